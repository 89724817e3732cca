"""The machine while something runs: the energy that it used, how busy it was, and the memory that engines hold."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import psutil
import torch
from torch import Tensor, nn

from specdec.cache.storage import Cache
from specdec.engine.engine import Engine
from specdec.quantization.base import QuantizedLinear, stored_bytes
from specdec.target.runner import ModelRunner

# ---------------------------------------------------------------- energy


@cache
def _counter(device: torch.device) -> Callable[[], float | None]:
    """The energy counter of an NVIDIA GPU, if the package ``nvidia-ml-py`` is there and the GPU has one."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        # By its own name: CUDA_VISIBLE_DEVICES may give the devices other numbers here than there.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # no package, no driver, a device without a counter: energy is then not measured, and said so
        return lambda: None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000


def joules_of(device: torch.device) -> float | None:
    """Return the joules that an NVIDIA GPU has counted so far; None for another device, or without a counter.

    The counter moves every 20 to 100 ms, so that only differences over seconds mean something.
    """
    if device.type != "cuda":
        return None
    try:
        return _counter(device)()
    except Exception:  # a counter that stops answering must not fail the call whose energy it counts
        return None


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


def held_by(engines: Sequence[Engine]) -> dict[str, int]:
    """Return the bytes that some engines hold, each tensor once.

    Returns:
        ``weights``: the targets' parameters and buffers, norms and biases included; ``drafter``: those of drafting
        models that are not the target's; ``kv``, ``drafter_kv``: the caches of both, without the positions for the
        nodes of drafts; ``scratch``: these, in both; ``copies`` of weights that are multiplied faster, without those
        that the weights' own memory holds; and the ``total``.
    """
    own = [engine.runner for engine in dict.fromkeys(engines)]
    drafting = [part for each in dict.fromkeys(engines) if each.session is not None for part in each.session.models]
    theirs = [part for part in drafting if isinstance(part, ModelRunner)]
    copies = {weight: size for each in [*own, *theirs] for weight, size in each.executor.copies().items()}
    caches = [runner.cache for runner in own]
    kv, nodes = _cache_bytes(caches)
    drafter_kv, drafter_nodes = _cache_bytes(runner.cache for runner in theirs if runner.cache not in caches)
    running = [part.model if isinstance(part, ModelRunner) else part for part in (*own, *drafting)]
    layers = {id(layer): layer for model in running for layer in model.modules() if isinstance(layer, QuantizedLinear)}
    panels = [packed for layer in layers.values() if (packed := layer.panels())]
    weights, drafter = _tensors(runner.model for runner in own), _tensors(running[len(own) :])
    placed = {each.panels.data_ptr(): each.panels.nbytes for each in panels}
    once = sum(placed[key] for key in placed.keys() & {*weights, *drafter})
    held = {
        "weights": sum(map(stored_bytes, weights.values())),
        "drafter": sum(stored_bytes(drafter[key]) for key in drafter.keys() - weights.keys()),
        "kv": kv,
        "drafter_kv": drafter_kv,
        "scratch": nodes + drafter_nodes,
        "copies": sum(copies.values()) + sum(each.bytes for each in panels) - once,
    }
    return held | {"total": sum(held.values())}


def process_bytes() -> dict[str, int]:
    """Return the bytes that this process holds, mapped files included: now (``process``), and the ``most`` so far."""
    now = psutil.Process().memory_info().rss
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return {"process": now}
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"process": now, "most": max(now, most)}


def _tensors(modules: Iterable[nn.Module]) -> dict[int, Tensor]:
    """The tensors of modules; two names of one table are one tensor."""

    def key(tensor: Tensor) -> int:
        return id(tensor) if tensor.is_meta or hasattr(tensor, "__tensor_flatten__") else tensor.data_ptr()

    return {key(each): each for module in modules for each in (*module.parameters(), *module.buffers())}


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
