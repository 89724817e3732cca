"""The machine while something runs: the energy that it used, how busy it was, and the memory that was taken."""

import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from specdec.cache.storage import Cache
from specdec.engine.engine import Engine
from specdec.quantization.base import stored_bytes
from specdec.target.runner import ModelRunner

# ---------------------------------------------------------------- energy

POWERCAP = Path("/sys/class/powercap")
"""Where Linux has the counters of the processor's packages (RAPL). Reading them often needs rights."""

Counter = tuple[Callable[[], float | None], float]
"""A function that returns the joules counted so far (None where that is not known), and how many joules are counted
before the counter begins anew at 0."""


class EnergyMeter:
    """Measures energy between two moments by a device's counters; it is never estimated from the rated power.

    An NVIDIA GPU counts its own energy, and its counter moves every 20 to 100 ms. A processor's package counts that of
    all programs on it. So only sums over seconds mean something.
    """

    def __init__(self, counters: Sequence[Counter]):
        self._counters = counters
        self._start = [read() for read, _ in counters]

    def stop(self) -> float | None:
        """Return the joules since the meter was made, over all counters; None where one of them is not known."""
        total = 0.0
        for (read, full), start in zip(self._counters, self._start, strict=True):
            end = read()
            if start is None or end is None:
                return None
            total += end - start if end >= start else end - start + full
        return total if self._counters else None


@cache
def counters_of(device: torch.device) -> tuple[Counter, ...]:
    """Return the counters of a device; none where there are none, or where they may not be read."""
    if device.type == "cuda":
        return _gpu_counter(device.index or 0)
    return packages(POWERCAP) if device.type == "cpu" else ()


def packages(folder: Path) -> tuple[Counter, ...]:
    """Return the counters of the processor's packages in a folder; none if any of them cannot be read."""
    # `intel-rapl:0` is a package (AMD's too), `intel-rapl:0:1` a part of it, which would count twice. `psys` is the
    # whole board, and `intel-rapl-mmio` the same package again.
    counters: list[Counter] = []
    for zone in sorted(folder.glob("intel-rapl:*")):
        if zone.name.count(":") != 1 or not (_text(zone / "name") or "").startswith("package"):
            continue
        full = _joules(zone / "max_energy_range_uj")
        if full is None or _joules(zone / "energy_uj") is None:
            return ()
        counters.append((lambda path=zone / "energy_uj": _joules(path), full))
    return tuple(counters)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def _joules(path: Path) -> float | None:
    """A counter's file, which is in millionths of a joule."""
    text = _text(path)
    return int(text) / 1e6 if text is not None and text.isdigit() else None


def _gpu_counter(index: int) -> tuple[Counter, ...]:
    """The counter of an NVIDIA GPU, if the package ``nvidia-ml-py`` is there and the GPU has one (since Volta)."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        # By its own name: CUDA_VISIBLE_DEVICES may give the devices other numbers here than there.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")

        def read() -> float | None:
            try:
                return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
            except pynvml.NVMLError:
                return None

        return () if read() is None else ((read, float("inf")),)
    except Exception:  # no package, no driver, a device without a counter: energy is then not measured, and said so
        return ()


# ---------------------------------------------------------------- load

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""States of a core that is not idle. Time that a virtual machine's host kept for itself (steal) counts, too."""
Clocks = tuple[float, float, float, int]
"""Seconds: wall time, time that the usable cores were busy, CPU time of this process and those that it has started;
and the number of these cores."""


class LoadMeter:
    """Measures between two moments how busy the machine is; ``read`` gives the clocks, or None where nothing tells."""

    def __init__(self, read: "Callable[[], Clocks | None] | None" = None):
        self._read = read or read_clocks
        self._start = self._read()

    def stop(self) -> dict[str, float]:
        """Return the load since the meter was made, in cores.

        Returns:
            ``own``: what this process and those that it has started used; ``others``: what all others used; ``cores``:
            how many there are. The system counts in steps of about 10 ms, so ``others`` of a short time may be below 0:
            means over a run are right. Empty where the system does not tell.
        """
        start, end = self._start, self._read()
        if start is None or end is None or end[0] <= start[0]:
            return {}
        own, busy = ((end[which] - start[which]) / (end[0] - start[0]) for which in (2, 1))
        return {"cores": end[3], "own": round(own, 4), "others": round(busy - own, 4)}


def read_clocks() -> Clocks | None:
    """Return the clocks of this system; None where it does not tell."""
    try:
        every = psutil.cpu_times(percpu=True)
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
        listed = [every[number] for number in usable if number < len(every)]
        ours = [psutil.Process(), *psutil.Process().children()]  # other engines decode in processes of their own
        own = [process.cpu_times() for process in ours]
    except (OSError, psutil.Error, NotImplementedError, RuntimeError):
        return None
    busy = sum(getattr(times, name, 0.0) for times in listed for name in _BUSY)  # not every system has all of them
    return time.monotonic(), busy, sum(times.user + times.system for times in own), len(listed)


# ---------------------------------------------------------------- memory

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def held_by(engines: Sequence[Engine]) -> dict[str, int]:
    """Return the bytes that some engines hold, each tensor once.

    Returns:
        ``weights``: the targets' parameters and buffers, norms and biases included; ``drafter``: those of drafting
        models that are not the target's; ``kv``, ``drafter_kv``: the caches of both, without the positions for the
        nodes of drafts; ``scratch``: these, in both; ``copies`` of weights that are multiplied faster; and the
        ``total``.
    """
    different = list(dict.fromkeys(engines))
    own = [engine.runner for engine in different]
    drafting = [part for engine in different if engine.session is not None for part in engine.session.models]
    theirs = [part for part in drafting if isinstance(part, ModelRunner)]
    copies = {weight: size for each in [*own, *theirs] for weight, size in each.executor.copies().items()}
    caches = [runner.cache for runner in own]
    kv, nodes = _cache_bytes(caches)
    drafter_kv, drafter_nodes = _cache_bytes(runner.cache for runner in theirs if runner.cache not in caches)
    seen: set[int] = set()
    held = {
        "weights": _bytes((runner.model for runner in own), seen),
        "drafter": _bytes((part.model if isinstance(part, ModelRunner) else part for part in drafting), seen),
        "kv": kv,
        "drafter_kv": drafter_kv,
        "scratch": nodes + drafter_nodes,
        "copies": sum(copies.values()),
    }
    return held | {"total": sum(held.values())}


def drafter_cache(engine: Engine) -> dict[str, int | None]:
    """Return what the caches of the drafting models hold, the target's left out.

    Returns:
        ``bytes_per_position`` of a row; ``window``: the most positions that a layer sees, None if one sees them all.
    """
    parts = engine.session.models if engine.session is not None else ()
    own = [part for part in parts if isinstance(part, ModelRunner) and part.cache is not engine.runner.cache]
    windows = [reach.window or reach.chunk for part in own for reach in part.facts.distinct_reaches]
    return {
        "bytes_per_position": sum({part.cache: part.bytes_per_token for part in own}.values()),
        "window": None if None in windows else max((size for size in windows if size is not None), default=None),
    }


def _bytes(modules: Iterable[nn.Module], seen: set[int]) -> int:
    """Return the bytes of tensors that have not been seen; two names of one table are one tensor."""

    def key(tensor: Tensor) -> int:
        return id(tensor) if tensor.is_meta or hasattr(tensor, "__tensor_flatten__") else tensor.data_ptr()

    tensors = {key(each): each for module in modules for each in (*module.parameters(), *module.buffers())}
    new = tensors.keys() - seen
    seen.update(new)
    return sum(stored_bytes(tensors[number]) for number in new)


def _cache_bytes(caches: Iterable[Cache]) -> tuple[int, int]:
    """Return the bytes of caches: of committed positions, and of those for the nodes of drafts."""
    kept = nodes = 0
    for cached in caches:
        drafted = cached.positions - cached.max_length
        whole = sum(tensor.numel() * tensor.element_size() for tensor in cached.tensors)
        behind = whole * drafted // cached.positions
        if cached.states is not None:  # a state for every node, beside those of the row and its root
            whole += cached.states.bytes
            behind += cached.slots * drafted * cached.states.bytes_per_state
        kept, nodes = kept + whole - behind, nodes + behind
    return kept, nodes


class PeakMeter:
    """Measures the most memory from now on.

    On Linux, the process's peak is set back to what it has now. Elsewhere it is that of its whole life.
    """

    def __init__(self, device: torch.device):
        self._device, self._before = device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            _RESET.write_text("5")
        except OSError:  # another system, or a container that forbids it
            pass
        self._before = psutil.Process().memory_info().rss

    def peak(self) -> dict[str, Any]:
        """Return the most so far.

        Returns:
            ``used`` bytes: on a GPU those in tensors; elsewhere the process's resident memory beyond what it had
            ``before``. On a GPU, what the allocator had ``reserved``, and its ``fragmentation``, which no tensor used;
            None elsewhere.
        """
        if self._device.type == "cuda":
            used = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.max_memory_reserved(self._device)
            return {"used": used, "reserved": reserved, "before": 0, "fragmentation": reserved - used}
        used = max(0, _peak_of_process() - self._before)
        return {"used": used, "reserved": None, "before": self._before, "fragmentation": None}


def _peak_of_process() -> int:
    if _STATUS.is_file():
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
