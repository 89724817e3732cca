"""Memory that a run's models and caches take, and the most that the process has had at once."""

import resource
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from specdec.cache.base import Cache
from specdec.engine.engine import Engine
from specdec.quantization.stored import stored_bytes
from specdec.target.runner import ModelRunner

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that are allocated, by what they are for.

    Attributes:
        weights: The targets' parameters and buffers, norms and biases included.
        drafter: Those of drafting models that are not the target's.
        kv: The targets' caches, without the positions for the nodes of drafts.
        drafter_kv: The drafting models' caches, likewise.
        scratch: The positions for the nodes of drafts, in both.
        copies: Copies of weights that are multiplied faster.
    """

    weights: int
    drafter: int
    kv: int
    drafter_kv: int
    scratch: int
    copies: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.drafter + self.kv + self.drafter_kv + self.scratch + self.copies


def held_by(engines: Sequence[Engine]) -> Held:
    """Returns the bytes that some engines hold, each tensor once."""
    different = list(dict.fromkeys(engines))
    own = [engine.runner for engine in different]
    drafting = [part for engine in different if engine.session is not None for part in engine.session.models]
    theirs = [part for part in drafting if isinstance(part, ModelRunner)]
    seen: set[int] = set()
    weights = _bytes((tensor for runner in own for tensor in _tensors(runner.model)), seen)
    copies = {weight: size for each in [*own, *theirs] for weight, size in each.executor.copies().items()}
    kv, nodes = _cache_bytes(runner.cache for runner in own)
    drafter_kv, drafter_nodes = _cache_bytes(runner.cache for runner in theirs)
    return Held(
        weights=weights,
        drafter=_bytes((t for part in drafting for t in _tensors(_module(part))), seen),
        kv=kv,
        drafter_kv=drafter_kv,
        scratch=nodes + drafter_nodes,
        copies=sum(copies.values()),
    )


def _module(part: ModelRunner | nn.Module) -> nn.Module:
    return part.model if isinstance(part, ModelRunner) else part


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Returns the bytes of tensors that have not been seen; two names of one table are one tensor."""
    size = 0
    for tensor in tensors:
        key = id(tensor) if tensor.is_meta or hasattr(tensor, "__tensor_flatten__") else tensor.data_ptr()
        if key not in seen:
            seen.add(key)
            size += stored_bytes(tensor)
    return size


def _cache_bytes(caches: Iterable[Cache]) -> tuple[int, int]:
    """Returns the bytes of caches: of committed positions, and of those for the nodes of drafts."""
    kept = nodes = 0
    for cache in caches:
        whole = sum(tensor.numel() * tensor.element_size() for tensor in cache.tensors)
        behind = whole * (cache.positions - cache.max_length) // cache.positions
        kept, nodes = kept + whole - behind, nodes + behind
    return kept, nodes


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most memory that there was at once since ``PeakMeter`` began.

    Attributes:
        used: Bytes: on a GPU those in tensors; elsewhere the process's resident memory beyond what it had before.
        reserved: On a GPU, what the allocator had taken from the device; None elsewhere.
        before: Resident bytes of the process before; 0 on a GPU.
    """

    used: int
    reserved: int | None = None
    before: int = 0

    @property
    def fragmentation(self) -> int | None:
        """Bytes that the allocator had taken and no tensor used; None where there is no such allocator."""
        return None if self.reserved is None else self.reserved - self.used


class PeakMeter:
    """Measures the most memory from now on.

    On Linux, the process's peak is set back to what it has now. Elsewhere it is that of its whole life.

    Args:
        device: Where the models run.
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

    def peak(self) -> Peak:
        """Returns the most so far."""
        if self._device.type == "cuda":
            return Peak(
                used=torch.cuda.max_memory_allocated(self._device),
                reserved=torch.cuda.max_memory_reserved(self._device),
            )
        return Peak(used=max(0, _peak_of_process() - self._before), before=self._before)


def _peak_of_process() -> int:
    if _STATUS.is_file():
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
