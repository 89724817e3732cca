"""The operations that fake tensors leave to the C++ of a build for CUDA: indexing, copies, and reading on the host."""

import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

ROOT = Path(__file__).parents[3]
_aten = torch.ops.aten


def _active() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def patch_tensors(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    """Do so, count what the host reads on a ``fake_cuda.Device``, and remember constants."""
    tensor, from_numpy = torch.tensor, torch.from_numpy

    def made(real: Tensor, place: Any) -> Tensor:
        fake = torch.empty(real.shape, dtype=real.dtype, device="cpu")
        fake = fake if place is None else fake.to(place)
        vars(fake)["numbers"] = real
        return fake

    def fake_tensor(data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
        if not _active():
            return tensor(data, dtype=dtype, device=device)
        with unset_fake_temporarily():
            real = tensor(data, dtype=dtype, device="cpu")
        return made(real, device)

    def fake_from_numpy(array: np.ndarray) -> Tensor:
        if not _active():
            return from_numpy(array)
        with unset_fake_temporarily():
            real = from_numpy(np.array(array))
        return made(real, None)

    def read(self: Tensor, otherwise: Any = None) -> Any:
        if self.device.type == "cuda":
            device.waited("a read of values")
        if "numbers" in vars(self):
            with unset_fake_temporarily():
                return vars(self)["numbers"].tolist()
        if otherwise is None:
            raise RuntimeError(f"the host reads numbers that nobody knows here, at {where()}")
        return otherwise

    monkeypatch.setattr(torch, "tensor", fake_tensor)
    monkeypatch.setattr(torch, "from_numpy", fake_from_numpy)
    for name, function in {
        "__getitem__": _getitem,
        "__setitem__": _setitem,
        "__invert__": lambda self: _aten.bitwise_not(self),
        "tolist": read,
        "item": lambda self: read(self, 1),
        "__int__": lambda self: int(read(self, 1)),
        "__index__": lambda self: int(read(self, 1)),
        "__float__": lambda self: float(read(self, 1)),
        "__bool__": lambda self: bool(read(self, 1)),
        "copy_": _copy,
        "contiguous": lambda self, **_: _contiguous(self),
        "data_ptr": lambda self: self.untyped_storage()._cdata + self.storage_offset() * self.element_size(),
    }.items():
        monkeypatch.setattr(FakeTensor, name, function, raising=False)


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether several elements stand at one place, as after ``expand``."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if overlaps_itself(self):
        raise RuntimeError("more than one element of the written-to tensor refers to a single memory location")
    return _aten.copy_(self, source, non_blocking)


def _contiguous(self: Tensor) -> Tensor:
    return self if self.is_contiguous() else _aten.clone(self, memory_format=torch.contiguous_format)


def _viewed(self: Tensor, item: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Return the view that integers, slices and None in an index give, and the tensors that are left of it."""
    items = list(item) if isinstance(item, tuple) else [item]
    if any(each is Ellipsis for each in items):
        at = next(number for number, each in enumerate(items) if each is Ellipsis)
        items[at : at + 1] = [slice(None)] * (self.dim() + 1 - sum(each is not None for each in items))
    view, dim = self, 0
    tensors: dict[int, Tensor] = {}
    for each in items:
        if each is None:
            view = _aten.unsqueeze(view, dim)
        elif isinstance(each, (int, np.integer)) and not isinstance(each, bool):
            view = _aten.select(view, dim, int(each))
            continue
        elif isinstance(each, slice):
            if each != slice(None):  # torch makes no view of everything
                view = _aten.slice(view, dim, each.start, each.stop, each.step or 1)
        else:
            tensors[dim] = each if isinstance(each, Tensor) else torch.tensor(each, device=self.device)
        dim += 1
    return view, [tensors.get(dim) for dim in range(max(tensors) + 1)] if tensors else []


def _getitem(self: Tensor, item: Any) -> Tensor:
    view, tensors = _viewed(self, item)
    if tensors:
        return _aten.index(view, tensors)
    return _aten.alias(view) if view is self else view


def _setitem(self: Tensor, item: Any, value: Any) -> None:
    view, tensors = _viewed(self, item)
    if not isinstance(value, Tensor):
        value = _aten.full([], value, dtype=self.dtype, device=self.device)
    if tensors:
        _aten.index_put_(view, tensors, value.to(view.dtype))
    else:
        _copy(view, value)


def where() -> str:
    file, line = place()
    return f"{file}:{line}"


def place() -> tuple[str, int]:
    """Return the file and the line of the project that asked for this."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and "tests" not in path.parts and path.name != "counting.py":
            return str(path.relative_to(ROOT)), frame.lineno or 0
    return "no file of this project", 0
