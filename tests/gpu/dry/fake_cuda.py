"""A GPU that is not there, for torch's fake tensors: they have shapes, dtypes and devices, but no numbers.

Code on such tensors takes the branches that it would take on a GPU. What a GPU would refuse fails here, too: a read by
the host or a copy from it while a graph is captured, an operation on tensors of two devices, a copy into memory that
overlaps itself. Waits of the host and launches are counted (``Device``).
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
import triton
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import InterpretedFunction

import specdec.engine.round
import specdec.kernels.trees
import specdec.target.facts
from specdec.batch import Matchers
from specdec.counting import depends_on_values
from specdec.engine.intake import Intake
from specdec.execution.recorder import CudaGraphRecorder, Stage
from specdec.requests import SamplingParams
from tests.gpu.dry.fake_tensors import overlaps_itself, patch_tensors, place, where

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MODE = FakeTensorMode(allow_non_fake_inputs=True)
"""One for the process: tables that are made once for a device are made of its tensors."""

_PROPERTIES = {"multi_processor_count": 132, "shared_memory_per_block_optin": 227 * 1024, "total_memory": 150 << 30}


@dataclass
class Device:
    """The work of a GPU that is not there.

    Attributes:
        kernels: Launches by the stage in whose graph they are, and by operation; those outside of graphs under "".
        waits: Places where the host waited for the device, outside of captures.
        capability, compiles: See ``fake_cuda``.
        captured: The number of graphs.
        overlapping: Outputs of stages of which several elements stand at one place (stride 0).
        stage: The stage that was last recorded.
        capturing: The stage that is being captured, or "".
        sync_debug_mode: As ``torch.cuda.set_sync_debug_mode`` was told; "warn" has every wait warned of.
    """

    kernels: dict[str, Counter[str]] = field(default_factory=dict)
    waits: Counter[str] = field(default_factory=Counter)
    capability: int = 90
    compiles: bool = False
    captured: int = 0
    overlapping: list[str] = field(default_factory=list)
    stage: str = ""
    capturing: str = ""
    sync_debug_mode: str = "default"

    def launched(self, operation: str) -> None:
        """Count a launch."""
        self.kernels.setdefault(self.capturing, Counter())[operation] += 1

    def waited(self, what: str) -> None:
        """Count a wait, which breaks off a capture."""
        if self.capturing:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what} at {where()}")
        self.waits[f"{what} at {where()}"] += 1
        if self.sync_debug_mode == "warn":
            warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, *place())


@contextlib.contextmanager
def fake_cuda(capability: int = 90, *, compiles: bool = False) -> Iterator[Device]:
    """During the ``with`` block, there is a GPU for tensors of ``CUDA``."""
    device = Device(capability=capability, compiles=compiles)
    with pytest.MonkeyPatch.context() as monkeypatch, MODE:
        _patch_cuda(monkeypatch, device)
        patch_tensors(monkeypatch, device)
        _patch_project(monkeypatch, device)
        _patch_grammars(monkeypatch, device)
        with _Launches(device):
            yield device


def move(owner: object) -> None:
    """Put all modules of an object onto the GPU that is not there; only their shapes matter."""
    with MODE:
        for part in _modules(owner, set()):
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(_empty(parameter), requires_grad=False)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = _empty(buffer)


def _modules(owner: object, seen: set[int]) -> Iterator[nn.Module]:
    """Yields the modules that an object of this project holds, and those that these hold."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, nn.Module):
        yield from owner.modules()
    elif isinstance(owner, (list, tuple, dict)):
        for each in owner.values() if isinstance(owner, dict) else owner:
            yield from _modules(each, seen)
    elif type(owner).__module__.split(".")[0] in ("specdec", "drafters", "experiments"):
        yield from _modules(vars(owner), seen)


def _empty(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=CUDA)


class _Launches(TorchDispatchMode):
    """Counts kernels, and sees what crosses between the devices."""

    def __init__(self, device: Device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # an attribute
            return func(*args, **kwargs)
        if func._can_decompose():  # in inference mode, torch leaves this to us
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = [each for each in given if each.device.type == "cuda"]
        name = func._schema.name.removeprefix("aten::")
        if on_gpu and depends_on_values(func, args):
            self._device.waited(name)
        outputs = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        copies = name in ("_to_copy", "copy_")
        if copies and len({each.device.type for each in (*given, *made)}) > 1:
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
            way = "from" if made[0].device.type == "cuda" else "to"
            if waits or way == "to":
                self._device.waited(f"a copy {way} the host")
            elif self._device.capturing:
                raise RuntimeError(f"not repeated by a replay: a copy {way} the host at {where()}")
        elif on_gpu and any(each.device.type == "cpu" and each.dim() > 0 for each in given):
            raise RuntimeError(f"{name} of tensors on two devices at {where()}")
        if any(each.device.type == "cuda" for each in made) and not _only_looks(name, given, made, func):
            self._device.launched(name)
        if made and all(each.numel() <= _SMALL for each in made):
            _follow(func, args, kwargs, given, made)
        return outputs


_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "detach", "alias")
_SMALL = 4096


def _follow(func: Any, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]) -> None:
    """Compute what is known: tables of static shapes, which the host reads once, on a device, too."""
    if func._schema.name.removeprefix("aten::") in _EMPTY[:5] or not all("numbers" in vars(each) for each in given):
        for each in made:  # if it was written to
            vars(each).pop("numbers", None)
        return

    def real(leaf: Any) -> Any:
        return vars(leaf)["numbers"] if isinstance(leaf, Tensor) else CPU if isinstance(leaf, torch.device) else leaf

    with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
        found = tree_leaves(func(*tree_map(real, args), **tree_map(real, kwargs)))
    for each, numbers in zip(made, found, strict=True):
        vars(each)["numbers"] = numbers


def _only_looks(name: str, given: list[Tensor], made: list[Tensor], func: Any) -> bool:
    """Whether an operation launches nothing: it makes no tensor, or one without numbers."""
    if name in _EMPTY:
        return True
    memory = {each.untyped_storage()._cdata for each in given}
    return not func._schema.is_mutable and all(each.untyped_storage()._cdata in memory for each in made)


class _Graph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def replay(self) -> None:
        pass


class _Capture(contextlib.AbstractContextManager):
    """Stands for ``torch.cuda.graph``: a pool ends with the last of its graphs, and is not taken again."""

    device: Device
    graphs: WeakKeyDictionary[_Graph, object]  # with the pool of each
    begun: set[object]

    def __init__(self, graph: _Graph, *, pool: object, capture_error_mode: str):
        if pool in self.begun and pool not in self.graphs.values():
            raise RuntimeError("the pool of graphs that are all gone was given again")
        self.begun.add(pool)
        self._graph, self._pool = graph, pool

    def __enter__(self) -> None:
        self.device.capturing = self.device.stage

    def __exit__(self, kind: Any, *error: Any) -> None:
        self.device.capturing = ""
        if kind is None:
            self.device.captured += 1
            self.graphs[self._graph] = self._pool


class _Fetched:
    """Stands for ``Fetch``: some tokens were accepted, and grammars are asked."""

    device: Device

    def __init__(self, tensor: Tensor):
        assert tensor.device.type == "cuda"
        self._shape, self._asks = tuple(tensor.shape), not tensor.is_floating_point()

    def wait(self) -> np.ndarray:
        """Returns a table as ``read_back.pack`` makes it, without alternatives; as many numbers as a question has."""
        if self._asks:
            self.device.waited("the question to grammars")
            return np.zeros(self._shape, dtype=np.int64)
        self.device.waited("the read of a round")
        width = (self._shape[1] - 4) // 3
        accepted = min(1, width - 1)
        table = np.zeros(self._shape)
        table[:, :width] = 5
        table[:, width : 2 * width - 1] = -1
        table[:, width : width + accepted] = np.arange(1, accepted + 1)
        table[:, 2 * width - 1 : 2 * width + 3] = accepted, accepted, accepted, 1
        return table


def _patch_cuda(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """Put a GPU into ``torch.cuda``."""
    nothing = lambda *args, **named: contextlib.nullcontext()  # noqa: E731
    properties, run = SimpleNamespace(**_PROPERTIES), triton.runtime.JITFunction.run
    properties.major, properties.minor = divmod(device.capability, 10)
    for name, value in {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "mem_get_info": lambda device=None: (140 << 30, 150 << 30),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "is_bf16_supported": lambda *args, **named: True,
        "synchronize": lambda place=None: device.waited("synchronize"),
        "set_sync_debug_mode": lambda mode: setattr(device, "sync_debug_mode", mode),
        "get_sync_debug_mode": lambda: device.sync_debug_mode,
        "current_stream": lambda device=None: None,
        "set_stream": lambda stream: None,
        "current_device": lambda: 0,
        "device": nothing,
        "device_of": nothing,
        "graph": type("Capture", (_Capture,), {"device": device, "graphs": WeakKeyDictionary(), "begun": set()}),
        "CUDAGraph": _Graph,
        "graph_pool_handle": object,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        if any(isinstance(each, Tensor) and each.device.type != "cuda" for each in (*args, *named.values())):
            raise RuntimeError(f"{kernel.fn.__name__} was given a tensor of the host at {where()}")
        device.launched(f"triton {kernel.fn.__name__}")
        if device.compiles:
            with unset_fake_temporarily():
                run(kernel, *args, grid=grid, warmup=warmup, **named)

    monkeypatch.setattr(triton.runtime.JITFunction, "run", launch)
    monkeypatch.setattr(InterpretedFunction, "run", launch)


def _patch_project(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """Give the host what it reads of a trial and of rounds, and note what is recorded."""
    record = CudaGraphRecorder.record

    def recorded(self: CudaGraphRecorder, name: str, stage: Stage, inputs: Sequence[Tensor]) -> Any:
        device.stage = name
        recording, outputs = record(self, name, stage, inputs)
        device.overlapping += [f"{name}, {tuple(each.shape)}" for each in outputs if overlaps_itself(each)]
        return recording, outputs

    monkeypatch.setattr(CudaGraphRecorder, "record", recorded)
    connected = specdec.kernels.trees.connected

    def known(parents: Tensor, max_depth: int) -> dict[str, Tensor]:
        tables = connected(parents, max_depth)
        if "numbers" in vars(parents):
            with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
                rows = vars(parents)["numbers"]
                depth = torch.zeros_like(rows)
                for node in range(1, rows.shape[1]):
                    depth[:, node] = depth.gather(1, rows[:, node : node + 1])[:, 0] + 1
            vars(tables["depth"])["numbers"] = depth
        return tables

    monkeypatch.setattr(specdec.kernels.trees, "connected", known)
    monkeypatch.setattr(specdec.target.facts, "differs", lambda *args, **named: None)
    monkeypatch.setattr(specdec.engine.round, "Fetch", type("Fetch", (_Fetched,), {"device": device}))


def _patch_grammars(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """Let grammars allow everything, whatever they are asked."""

    def matcher(self: Intake, sampling: SamplingParams, *, speculate: bool) -> Any:
        grammar = sampling.grammar
        return grammar and SimpleNamespace(masks_drafts=grammar.mask_drafts, follow=lambda tokens: None)

    def answer(self: Matchers, question: np.ndarray, *, drafts: bool = False) -> np.ndarray:
        return np.full((*question.shape[:2], -(-self._vocab_size // 32)), -1, dtype=np.int32)

    def now(self: Matchers, question: Tensor, drafts: bool) -> Tensor:
        numbers = specdec.engine.round.Fetch(question).wait()
        return torch.from_numpy(self.answer(numbers, drafts=drafts)).to(question.device, non_blocking=True)

    monkeypatch.setattr(Intake, "matcher", matcher)
    monkeypatch.setattr(Matchers, "answer", answer)
    monkeypatch.setattr(Matchers, "_now", now)
