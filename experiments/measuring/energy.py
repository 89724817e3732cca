"""The energy that a device used between two moments, from a counter; never an estimate from its rated power."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

POWERCAP = Path("/sys/class/powercap")
"""Where Linux has the counters of the processor's packages (RAPL). Reading them often needs rights."""

Counter = Callable[[], float | None]
"""Returns the joules counted so far; None where that is not known."""


class EnergyMeter:
    """Measures energy between two moments.

    An NVIDIA GPU counts its own energy, and its counter moves every 20 to 100 ms. A processor's package counts that of
    all programs on it. So only sums over seconds mean something.

    Args:
        device: Where the work runs.
        counters: What to read instead of the device's counters.
    """

    def __init__(self, device: torch.device, counters: Sequence["Wrapping"] | None = None):
        self._counters = counters_of(device.type, device.index or 0) if counters is None else counters
        self._start = [counter.read() for counter in self._counters]

    def stop(self) -> float | None:
        """Returns the joules since the meter was made, over all counters; None where one of them is not known."""
        total = 0.0
        for counter, start in zip(self._counters, self._start, strict=True):
            end = counter.read()
            if start is None or end is None:
                return None
            total += end - start if end >= start else end - start + counter.range
        return total if self._counters else None


class Wrapping:
    """A counter that begins anew at 0 when it is full.

    Args:
        read: Returns the joules counted so far.
        full: How many joules it counts; infinite for a counter that does not wrap around.
    """

    def __init__(self, read: Counter, full: float = float("inf")):
        self.read, self.range = read, full


@cache
def counters_of(kind: str, index: int) -> tuple[Wrapping, ...]:
    """Returns the counters of a device; none where there are none, or where they may not be read.

    Args:
        kind: ``"cuda"`` or ``"cpu"``.
        index: Number of the device.
    """
    if kind == "cuda":
        return _of_gpu(index)
    return packages(POWERCAP) if kind == "cpu" else ()


def packages(folder: Path) -> tuple[Wrapping, ...]:
    """Returns the counters of the processor's packages; none if any of them cannot be read.

    Args:
        folder: Where the system has them.
    """
    # `intel-rapl:0` is a package (AMD's too), `intel-rapl:0:1` a part of it, which would count twice. `psys` is the
    # whole board, and `intel-rapl-mmio` the same package again.
    found = []
    for zone in sorted(folder.glob("intel-rapl:*")):
        if zone.name.count(":") != 1:
            continue
        name, joules = _text(zone / "name"), _joules(zone / "energy_uj")
        if name is None or not name.startswith("package"):
            continue
        full = _joules(zone / "max_energy_range_uj")
        if joules is None or full is None:
            return ()
        found.append(Wrapping(lambda path=zone / "energy_uj": _joules(path), full))
    return tuple(found)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def _joules(path: Path) -> float | None:
    """A counter's file, which is in millionths of a joule."""
    text = _text(path)
    return int(text) / 1e6 if text is not None and text.isdigit() else None


def _of_gpu(index: int) -> tuple[Wrapping, ...]:
    """The counter of an NVIDIA GPU, if the package ``nvidia-ml-py`` is there and the GPU has one (since Volta)."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        # By its own name: CUDA_VISIBLE_DEVICES may give the devices other numbers here than there.
        name = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)

        def read() -> float | None:
            try:
                return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
            except pynvml.NVMLError:
                return None

        return () if read() is None else (Wrapping(read),)
    except Exception:  # no package, no driver, a device without a counter: energy is then not measured, and said so
        return ()
