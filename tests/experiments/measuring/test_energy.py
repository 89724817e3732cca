"""Energy from counters that do not exist here: files as Linux has them, and counters made of lists."""

from pathlib import Path

import pytest
import torch

from experiments.measuring.energy import EnergyMeter, Wrapping, packages

CPU = torch.device("cpu")


def counter(*values: float | None, full: float = float("inf")) -> Wrapping:
    """A counter that has these readings, one after the other."""
    left = list(values)
    return Wrapping(lambda: left.pop(0), full)


@pytest.mark.parametrize(
    ("counters", "joules"),
    [
        ([], None),
        ([counter(5.0, 12.5)], 7.5),
        ([counter(5.0, 12.5), counter(1.0, 1.5)], 8.0),  # two packages
        ([counter(250.0, 10.0, full=262.0)], 22.0),  # it was full, and began anew
        ([counter(5.0, None)], None),
        ([counter(None, 5.0)], None),
    ],
)
def test_what_counters_say(counters: list[Wrapping], joules: float | None) -> None:
    assert EnergyMeter(CPU, counters).stop() == joules


def zone(folder: Path, name: str, label: str, microjoules: str, full: str = "262143328850") -> Path:
    made = folder / name
    made.mkdir(parents=True)
    for file, text in (("name", label), ("energy_uj", microjoules), ("max_energy_range_uj", full)):
        (made / file).write_text(f"{text}\n")
    return made


def test_packages_are_read_and_their_parts_are_not_counted_twice(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", "1000000")
    zone(tmp_path, "intel-rapl:0:0", "core", "700000")
    zone(tmp_path, "intel-rapl:1", "package-1", "2000000")
    zone(tmp_path, "intel-rapl:2", "psys", "9000000")
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", "1000000")
    found = packages(tmp_path)
    assert [each.read() for each in found] == [1.0, 2.0]
    meter = EnergyMeter(CPU, found)
    (first / "energy_uj").write_text("4500000\n")
    assert meter.stop() == 3.5


def test_counters_that_cannot_be_read_measure_nothing(tmp_path: Path) -> None:
    assert packages(tmp_path / "nowhere") == ()
    zone(tmp_path, "intel-rapl:0", "package-0", "1000000")
    hidden = zone(tmp_path, "intel-rapl:1", "package-1", "2000000")
    (hidden / "energy_uj").unlink()  # as without the right to read it
    assert packages(tmp_path) == ()
    assert EnergyMeter(CPU, packages(tmp_path)).stop() is None
