"""What devices can do at best: a table that ships as ``devices.yaml``, and rows that users add."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from specdec.physics.work import Roof

TABLE = Path(__file__).with_name("devices.yaml")
"""The table that ships, which describes its keys."""

_COMPUTES = ("float32", "tf32", "float16", "bfloat16", "fp8", "int8")
_NEEDED = ("memory", "bandwidth", "flops", "source")
_OPTIONAL = ("title", "cache", "measured", "chip")
_SECTIONS = {
    "flops": _COMPUTES,
    "measured": ("bandwidth", "flops"),
    "chip": ("processors", "registers", "shared", "link"),
}


@dataclass(frozen=True, kw_only=True)
class Device:
    """A row of the table: bytes, bytes per second, and operations per second in dense products by type, as printed.

    ``cache`` is the last one before memory, 0 if not known; ``measured`` has figures that were measured.
    """

    name: str
    title: str
    memory: float
    bandwidth: float
    flops: Mapping[str, float]
    cache: float
    source: str
    measured: Mapping[str, Any] | None = None
    chip: Mapping[str, float] | None = None

    def roof(self, dtype: str = "bfloat16", *, measured: bool = False) -> Roof:
        """Return the device's roof: by measured figures, where there are some and they are asked for.

        Raises ValueError: the device does not compute in this type.
        """
        known = (self.measured or {}) if measured else {}
        flops = known.get("flops", {}).get(dtype) or self.flops.get(dtype)
        if flops is None:
            raise ValueError(f"{self.title} does not compute in {dtype}: give one of {', '.join(self.flops)}")
        return Roof(bandwidth=known.get("bandwidth") or self.bandwidth, flops=flops)


def read_devices(path: Path = TABLE) -> dict[str, Device]:
    """Return the devices of a file of the form that ``devices.yaml`` describes, by name."""
    import yaml  # not needed for arithmetic

    try:
        # PyYAML takes 3.35e12 for a text: its numbers need a sign in the exponent. `_figures` takes both.
        rows: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"devices={str(path)!r} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(rows, Mapping) or not rows:
        raise ValueError(f"devices={str(path)!r} has no rows: give NAME: {{memory: …, bandwidth: …, flops: …}}")
    return {str(name): _device(str(name), row, f"{path}: {name}") for name, row in rows.items()}


def find_device(name: str, devices: Mapping[str, Device]) -> Device:
    """Return the device of a name, which may be written in any case, with spaces or underscores.

    Raises ValueError: there is none. Offers near names, or all of them.
    """
    wanted = name.lower().replace(" ", "-").replace("_", "-")
    if wanted in devices:
        return devices[wanted]
    near = [device for device in devices if device.startswith(wanted)]
    near = near or difflib.get_close_matches(wanted, devices, n=3, cutoff=0.5)
    told = f"did you mean {' or '.join(near)}?" if near else f"choose among {', '.join(devices)}"
    raise ValueError(f"there is no device {name!r} in the table: {told} (add rows with devices=FILE)")


def row_of(name: str, memory: float, devices: Mapping[str, Device]) -> Device | None:
    """Return the row of the table that a GPU's own name means ("NVIDIA H100 80GB HBM3"); None if there is none.

    ``memory`` tells devices of one name apart.
    """
    listed = name.lower().replace("-", " ").split()
    words = {*listed, *(first + second for first, second in pairwise(listed))}  # the table writes rtx4090 in one word
    parts = {key: [part for part in key.split("-") if not part.endswith("gb")] for key in devices}
    fitting = [key for key in devices if words.issuperset(parts[key])]
    # The most precise name, and of those with one name the one with this memory.
    best = min(fitting, key=lambda key: (-len(parts[key]), abs(devices[key].memory - memory)), default=None)
    return None if best is None else devices[best]


def _device(name: str, row: Any, where: str) -> Device:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is not a row: give memory, bandwidth, flops and source")
    for key in row:
        if key not in (*_NEEDED, *_OPTIONAL):
            raise ValueError(f"{where} has {str(key)!r}, which no row has")
    for key in _NEEDED:
        if row.get(key) is None:
            raise ValueError(f"{where} has no {key}")
    words = {"title": str(row.get("title") or name), "source": str(row["source"])}
    given = [(key, value) for key, value in row.items() if key not in words and value is not None]
    numbers = {key: _figures(value, f"{where}.{key}") for key, value in given if (key, value) != ("cache", 0)}
    return Device(name=name, **words, **{"cache": 0.0, **numbers})


def _figures(given: Any, where: str) -> Any:
    """A number above 0, or those of a section by name."""
    names = _SECTIONS.get(where.rpartition(".")[2])
    if names is not None:
        if not isinstance(given, Mapping) or not given or not set(given) <= set(names):
            raise ValueError(f"{where}={given!r}: give numbers by name, out of {', '.join(names)}")
        return {str(name): _figures(value, f"{where}.{name}") for name, value in given.items()}
    try:
        found = float(given)
    except (TypeError, ValueError):
        found = 0.0
    if isinstance(given, bool) or not 0 < found < float("inf"):
        raise ValueError(f"{where}={given!r}: give a number above 0")
    return found
