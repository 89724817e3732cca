"""The load meter, with clocks that are given, and with those of this machine."""

from collections.abc import Callable

from experiments.measuring.load import LoadMeter, Reading, read_clocks


def reader(*readings: Reading | None) -> Callable[[], Reading | None]:
    left = list(readings)
    return lambda: left.pop(0)


def test_load_in_cores() -> None:
    meter = LoadMeter(reader(Reading(10.0, 100.0, 7.0, 4), Reading(12.0, 105.0, 10.0, 4)))
    # Within 2 s, cores were busy for 5 s, of which this process had 3 s.
    assert meter.stop() == {"cores": 4, "own": 1.5, "others": 1.0}


def test_a_system_that_does_not_tell() -> None:
    assert LoadMeter(reader(None, None)).stop() == {}
    same = Reading(10.0, 100.0, 7.0, 4)
    assert LoadMeter(reader(same, same)).stop() == {}, "no time has passed"


def test_this_machine_tells() -> None:
    first, second = read_clocks(), read_clocks()
    assert first is not None
    assert second is not None
    assert first.cores >= 1
    assert second.wall >= first.wall
    assert second.own >= first.own
