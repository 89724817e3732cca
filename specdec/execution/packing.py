"""Linear weights in panels (``products``), which are used during our forwards only: the model itself is not changed."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from specdec.execution.frozen import epoch
from specdec.execution.norms import Forward, lent, modules_in_c
from specdec.execution.products import PanelWeight, panels, readable
from specdec.host import scoped
from specdec.machine import dtype_name
from specdec.memory import clean_files, drop, free_memory
from specdec.native import chosen, is_plain, loses, native_library

_SHARE = 0.5  # the share of the free memory that copies may take
_LEAST_DROPPED = 1 << 22  # bytes of weights for which it pays to ask which files hold them: that takes 50 ms
_CPU = torch.device("cpu")
_LEAST_16_BITS = 1 << 14  # numbers of the smallest weight in 16 bits whose product is not quicker by the plain path
_TRIED = (128, 32)  # rows for which torch's product is tried; fewer take the C

only_plain: ContextVar[bool] = ContextVar("plain_weights", default=False)
plain_weights = partial(scoped, only_plain, True)
"""During its ``with`` block, layers that pack their own weights (int8) use ordinary ones."""


class PackedLayer(NamedTuple):
    """A linear layer, the copy of its weight in panels, and a function that multiplies by it."""

    module: nn.Linear
    packed: PanelWeight
    forward: Forward


class PackedLinears:
    """Packed copies of a model's linear layers, with norms and activations in C (``norms``).

    Layers of other classes (quantized, adapted, distributed) are not packed. Copies are made only if half of the free
    memory holds them. Engines of one model, and models that have weights in common, have these copies in common.
    """

    def __init__(self, model: nn.Module):
        self._joint: dict[tuple[int, ...], PanelWeight] = {}
        linears = [module for module in model.modules() if isinstance(module, nn.Linear) and _packable(module)]
        new = {_key(module): module.weight.numel() * module.weight.element_size() for module in linears}
        size = sum(size for key, size in new.items() if key not in _copies)
        fit, files = size <= _SHARE * free_memory(_CPU), clean_files() if size >= _LEAST_DROPPED else []
        self.layers = [_layer(module, files) for module in linears if fit]
        self._others = list(modules_in_c(model))

    def bytes_by_weight(self) -> dict[int, int]:
        """Return the bytes of every copy, by the ``id`` of the weight that it stands for."""
        return {id(layer.module.weight): layer.packed.bytes for layer in self.layers}

    def joint(self, packed: Sequence[PanelWeight]) -> PanelWeight | None:
        """Return one packed weight for several layers, with outputs side by side; None if they do not fit together."""
        key = tuple(map(id, packed))
        if key not in self._joint:
            own = {id(layer.packed) for layer in self.layers}
            joint = _joint.get(key) or (PanelWeight.joined(packed) if own.issuperset(key) else None)
            if joint is None:
                return None
            joint.parts = tuple(packed)
            self._joint[key] = _joint[key] = joint
        return self._joint[key]

    def in_use(self) -> AbstractContextManager[None]:
        """Use the copies in place of the layers' weights during the ``with`` block."""
        return lent([*((layer.module, layer.forward) for layer in self.layers), *self._others])


# Only executors keep the copies alive: they must not outlive the engines.
_copies: WeakValueDictionary[tuple[object, ...], PanelWeight] = WeakValueDictionary()
_joint: WeakValueDictionary[tuple[int, ...], PanelWeight] = WeakValueDictionary()


def torch_rows(dtype: torch.dtype) -> int:
    """Return the number of rows from which on torch's product on a plain weight beats the C's here; 0 if it never does.

    It may with AMX, from many rows on. A row has other bits from that number on.
    """
    what = f"rows from which products in {dtype_name(dtype)} are torch's (0: none)"
    return chosen(what, partial(_torch_rows, dtype), 0)


def _torch_rows(dtype: torch.dtype) -> int:
    library: Any = native_library()
    # In tiles, a hundred rows take no longer than the weight takes from memory: caches must not hold it.
    tiles = dtype is torch.bfloat16 and library.tiles_from(0)
    weight = torch.ones((8192, 4096) if tiles else (512, 1024), dtype=dtype, device=_CPU)
    packed, found = panels(weight), 0
    assert packed is not None, "asked where the C is compiled"
    for rows in _TRIED:
        inputs = weight.new_ones(rows, weight.shape[1])
        if not loses(partial(packed.multiply, inputs, None), partial(nn.functional.linear, inputs, weight)):
            break
        found = rows
    return found


def _packable(module: nn.Linear) -> bool:
    # A `forward` of its own, or a weight of another class (another library's quantization), knows how to multiply.
    if type(module) is not nn.Linear or "forward" in vars(module) or type(module.weight) is not nn.Parameter:
        return False
    least = 1 if module.weight.dtype is torch.float32 else _LEAST_16_BITS
    return readable(module.weight) and module.weight.numel() >= least


def _layer(module: nn.Linear, files: list[tuple[int, int]]) -> PackedLayer:
    weight, key = module.weight, _key(module)
    packed, width = _copies.get(key) or panels(weight), weight.shape[1]
    assert packed is not None, "it is packable"
    _copies[key] = packed
    drop(module.weight, files)
    most = width * torch_rows(weight.dtype) or sys.maxsize

    def forward(inputs: Tensor) -> Tensor:
        other = inputs.dtype is not packed.dtype or torch.is_autocast_enabled("cpu")
        if other or not 1 <= inputs.numel() < most or not is_plain(inputs):
            return nn.functional.linear(inputs, module.weight, module.bias)
        return packed(inputs, module.bias)

    return PackedLayer(module, packed, forward)


def _key(module: nn.Linear) -> tuple[object, ...]:
    """Return what tells the copies of different weights apart: whose storage it is, and since when it was not changed.

    Fused optimizers and writes to ``.data`` move no counter; a few of the numbers tell them, mostly.
    """
    weight = module.weight.detach()
    some = weight.view(-1)[:: weight.numel() // 16 + 1].tolist() if weight.is_contiguous() else []
    version = 0 if weight.is_inference() else weight._version
    return epoch(), weight.shape, weight.stride(), weight.data_ptr(), weight.dtype, version, *some
