"""What devices can do at best: a table that ships as ``devices.yaml``, and rows that users add."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from specdec.physics.bounds import Roof

TABLE = Path(__file__).with_name("devices.yaml")
"""The table that ships."""

_COMPUTES = ("float32", "tf32", "float16", "bfloat16", "fp8", "int8")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured on a device, to stand beside what is printed.

    Attributes:
        bandwidth: Bytes per second; None if it was not measured.
        flops: Operations per second in matrix products, by what they compute in.
    """

    bandwidth: float | None
    flops: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What is on a device's chip, as printed. Explanations show it; no bound is computed with it.

    Attributes:
        processors: Streaming multiprocessors, which all compute at a time.
        registers: Bytes of registers in each.
        shared: Bytes of shared memory and first cache in each.
        link: Bytes per second to other devices, both directions together; None if there is no such link.
    """

    processors: int
    registers: float
    shared: float
    link: float | None = None


@dataclass(frozen=True, kw_only=True)
class Device:
    """A row of the table.

    Attributes:
        name: Its short name.
        title: What it is sold as.
        memory: Bytes.
        bandwidth: Bytes per second, as printed.
        flops: Operations per second in dense matrix products, by what they compute in, as printed.
        cache: Bytes of the last cache before memory; 0 if it is not known.
        source: Where the figures are printed.
        measured: What was measured; None if nothing was.
        chip: What is on its chip; None if the table does not say.
    """

    name: str
    title: str
    memory: float
    bandwidth: float
    flops: Mapping[str, float]
    cache: float
    source: str
    measured: Measured | None = None
    chip: Chip | None = None

    def roof(self, dtype: str = "bfloat16", *, measured: bool = False) -> Roof:
        """Return what the device does at best.

        Args:
            dtype: What matrix products compute in. Weights that are only stored in fewer bits are expanded first, and
                are computed with in the model's own type.
            measured: Take measured figures where there are some, instead of the printed ones.

        Raises:
            ValueError: The device does not compute in this type.
        """
        found = self.measured if measured else None
        flops = (found.flops.get(dtype) if found is not None else None) or self.flops.get(dtype)
        if flops is None:
            raise ValueError(f"{self.title} does not compute in {dtype}: give one of {', '.join(self.flops)}")
        bandwidth = (found.bandwidth if found is not None else None) or self.bandwidth
        return Roof(bandwidth=bandwidth, flops=flops)


def read_devices(path: Path = TABLE) -> dict[str, Device]:
    """Return the devices of a file, by name.

    Args:
        path: A YAML file of the form that ``devices.yaml`` describes.

    Raises:
        ValueError: The file cannot be read, or a row lacks something. Names the row and what is wrong.
    """
    import yaml  # not needed for arithmetic

    try:
        # PyYAML takes 3.35e12 for a text: its numbers need a sign in the exponent. `_number` takes both.
        rows: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"devices={str(path)!r} cannot be read: {reason}") from error
    if not isinstance(rows, Mapping) or not rows:
        raise ValueError(f"devices={str(path)!r} has no rows: give NAME: {{memory: …, bandwidth: …, flops: …}}")
    return {str(name): _device(str(name), row, path) for name, row in rows.items()}


def find_device(name: str, devices: Mapping[str, Device]) -> Device:
    """Return the device of a name, which may be written in any case, with spaces or underscores.

    Raises:
        ValueError: There is none. Offers near names, or all of them.
    """
    wanted = name.lower().replace(" ", "-").replace("_", "-")
    if wanted in devices:
        return devices[wanted]
    near = difflib.get_close_matches(wanted, devices, n=3, cutoff=0.5)
    near = [each for each in devices if each.startswith(wanted)] or near
    told = f"did you mean {' or '.join(near)}?" if near else f"choose among {', '.join(devices)}"
    raise ValueError(f"there is no device {name!r} in the table: {told} (add rows with devices=FILE)")


def row_of(name: str, memory: float, devices: Mapping[str, Device]) -> Device | None:
    """Return the row of the table that a GPU's own name means; None if there is none.

    Args:
        name: As the driver tells it: "NVIDIA H100 80GB HBM3".
        memory: Its bytes.
    """
    listed = name.lower().replace("-", " ").split()
    words = {*listed, *(first + second for first, second in pairwise(listed))}  # the table writes rtx4090 in one word
    parts = {key: [part for part in key.split("-") if not part.endswith("gb")] for key in devices}
    fitting = [key for key in devices if words.issuperset(parts[key])]
    # The most precise name, and of those with one name the one with this memory.
    best = min(fitting, key=lambda key: (-len(parts[key]), abs(devices[key].memory - memory)), default=None)
    return None if best is None else devices[best]


_CHIP = ("processors", "registers", "shared")


def _device(name: str, row: Any, path: Path) -> Device:
    if not isinstance(row, Mapping):
        raise ValueError(f"{path}: {name} is not a row: give memory, bandwidth, flops and source")
    unknown = set(row) - {each.name for each in fields(Device)} | ({"name"} & set(row))
    if unknown:
        raise ValueError(f"{path}: {name} has {sorted(map(str, unknown))[0]!r}, which no row has")
    for key in ("memory", "bandwidth", "flops", "source"):
        if row.get(key) is None:
            raise ValueError(f"{path}: {name} has no {key}")
    where, measured, chip = f"{path}: {name}", row.get("measured"), row.get("chip")
    if measured is not None and not isinstance(measured, Mapping):
        raise ValueError(f"{where}.measured is not a section: give bandwidth, flops or both")
    if chip is not None and (not isinstance(chip, Mapping) or not set(_CHIP) <= set(chip) <= {*_CHIP, "link"}):
        raise ValueError(f"{where}.chip={chip!r}: give {', '.join(_CHIP)}, and link if there is one")
    found = {key: _number(chip[key], f"{where}.chip.{key}") for key in chip} if chip is not None else {}
    return Device(
        name=name,
        title=str(row.get("title") or name),
        memory=_number(row["memory"], f"{where}.memory"),
        bandwidth=_number(row["bandwidth"], f"{where}.bandwidth"),
        flops=_rates(row["flops"], f"{where}.flops"),
        cache=_number(row["cache"], f"{where}.cache") if row.get("cache") else 0.0,
        source=str(row["source"]),
        measured=None if measured is None else _measured(measured, f"{where}.measured"),
        chip=Chip(**{**found, "processors": int(found["processors"])}) if found else None,
    )


def _measured(row: Mapping[str, Any], where: str) -> Measured:
    bandwidth, flops = row.get("bandwidth"), row.get("flops")
    return Measured(
        bandwidth=None if bandwidth is None else _number(bandwidth, f"{where}.bandwidth"),
        flops={} if flops is None else _rates(flops, f"{where}.flops"),
    )


def _rates(given: Any, where: str) -> dict[str, float]:
    if not isinstance(given, Mapping) or not given or set(given) - set(_COMPUTES):
        raise ValueError(f"{where}={given!r}: give rates by type, out of {', '.join(_COMPUTES)}")
    return {str(name): _number(rate, f"{where}.{name}") for name, rate in given.items()}


def _number(given: Any, where: str) -> float:
    try:
        found = float(given)
    except (TypeError, ValueError):
        found = 0.0
    if isinstance(given, bool) or not 0 < found < float("inf"):
        raise ValueError(f"{where}={given!r}: give a number above 0")
    return found
