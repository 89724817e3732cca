"""A weight that multiplies a few rows at the speed of the memory, where its C is compiled (``native.py``).

The weights are read once for all rows, as they are stored. For one row, torch's kernels use a half to two thirds of the
bandwidth that one core has; for a few rows, its int8 and int4 kernels are bound by unpacking the weights repeatedly.
``docs/engine.md`` has the figures.

The sums are those of torch's kernels in another order, in float32 as theirs. **A row's outputs are the same bits for
any number of rows**, up to ``most_rows``. So the products of plain decoding and of verification agree.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.execution.counting import count_operation
from specdec.execution.native import native_library
from specdec.execution.stored_weight import StoredWeight, is_plain
from specdec.machine import cpu

NO_MEMORY = "no memory for a few rows of inputs: lower batch sizes or lengths, or take a smaller model"

MOST_ROWS = 16
"""Rows up to which this product is used. With quantized weights it is faster than torch's for fewer, and even here."""

_FUNCTIONS = {torch.float32: "rows_float32", torch.bfloat16: "rows_bfloat16"}


class FewRows:
    """Multiplies a few rows by some weights side by side: their outputs stand one after the other.

    The weights are contiguous matrices ``[out, in]`` of one width and dtype, float32 or bfloat16. They are read where
    they are, and not copied.
    """

    def __init__(self, weights: list[Tensor]):
        library = native_library()
        assert library is not None, "asked by `few_rows`"
        dtype = weights[0].dtype
        self._function: Any = getattr(library, _FUNCTIONS[dtype])
        self._width = weights[0].shape[1]
        ends = list(itertools.accumulate(weight.shape[0] for weight in weights))
        self._parts = [
            (each, each.shape[0], (end - each.shape[0]) * dtype.itemsize)
            for each, end in zip(weights, ends, strict=True)
        ]
        self._out = ends[-1]

    def __call__(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product of contiguous rows ``[..., in]``, in the weights' dtype."""
        rows = inputs.numel() // self._width
        outputs = inputs.new_empty((*inputs.shape[:-1], self._out))
        given, into = inputs.data_ptr(), outputs.data_ptr()
        added = None if bias is None else bias.contiguous().data_ptr()
        for weight, out, offset in self._parts:
            some = None if added is None else added + offset
            if self._function(weight.data_ptr(), some, given, into + offset, out, self._width, rows, self._out) == 0:
                raise MemoryError(NO_MEMORY)
        count_operation("few_rows")
        return outputs


def most_rows(dtype: torch.dtype) -> int:
    """Return the number of rows up to which a weight that is not quantized should be multiplied here.

    With AVX512, oneDNN's float32 product of two rows or more is as fast, and that of nine faster.
    """
    return 1 if dtype is torch.float32 and "avx512f" in cpu().features else MOST_ROWS


def few_rows(weights: list[Tensor]) -> FewRows | None:
    """Return the product of a few rows with these weights; None if it is not compiled, or does not take them."""
    first = weights[0] if weights else None
    fits = first is not None and all(
        is_plain(weight)
        and weight.dtype in _FUNCTIONS
        and weight.dtype is first.dtype
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and weight.shape[1] == first.shape[1]
        for weight in weights
    )
    return FewRows(weights) if fits and native_library() is not None else None


def takes(inputs: Tensor, width: int, most: int = MOST_ROWS, bias: Tensor | None = None) -> bool:
    """Return whether these inputs are so few rows, and can be read where they lie, as can the bias if there is one."""
    few = inputs.numel() <= most * width and inputs.is_contiguous()
    return few and is_plain(inputs) and (bias is None or is_plain(bias))


class QuantizedRows(StoredWeight):
    """Quantized weights that multiply a few rows; ``int8_rows`` and ``int4_rows`` make them.

    Inputs and outputs are in the scales' dtype; in float32 they are rounded to bfloat16.
    """

    def __init__(self, name: str, weight: Tensor, scale: Tensor, size: int):
        library = native_library()
        assert library is not None, "asked by whoever makes it"
        self.dtype = dtype = scale.dtype
        self._function: Callable[..., int] = getattr(library, name)
        self._weight, self._scale = weight.detach(), scale.detach().float().contiguous()
        self._out, self._size, self._wide = weight.shape[0], size, dtype is torch.float32
        self.bytes = sum(each.numel() * each.element_size() for each in (self._weight, self._scale))

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """See ``StoredWeight.multiply``; for contiguous rows."""
        rows = inputs.numel() // inputs.shape[-1]
        outputs = inputs.new_empty((*inputs.shape[:-1], self._out))
        given = self._weight.data_ptr(), self._scale.data_ptr(), inputs.data_ptr(), outputs.data_ptr()
        if self._function(*given, self._out, self._size, rows, self._out, self._wide) == 0:
            raise MemoryError(NO_MEMORY)
        count_operation("few_rows")
        return outputs if bias is None else outputs.add_(bias)


def int8_rows(weight: Tensor, scale: Tensor) -> QuantizedRows | None:
    """Return the product of a few rows with int8 weights ``[out, in]`` and scales ``[out]`` in the inputs' dtype.

    None if it is not compiled, or does not take them.
    """
    return QuantizedRows("rows_int8", weight, scale, weight.shape[1]) if _readable(weight, scale) else None


def int4_rows(weight: Tensor, scale: Tensor, width: int) -> QuantizedRows | None:
    """Return the product of a few rows with int4 pairs ``[out, in / 2]`` with scales ``[out, in / 64]``.

    None if it is not compiled, or does not take them: the width must be a multiple of the group's 64 weights.
    """
    if not _readable(weight, scale) or width != 64 * scale.shape[1]:
        return None
    return QuantizedRows("rows_int4", weight, scale, scale.shape[1])


def _readable(weight: Tensor, scale: Tensor) -> bool:
    on_cpu = weight.device.type == "cpu" and weight.is_contiguous() and is_plain(weight) and is_plain(scale)
    return on_cpu and scale.dtype in _FUNCTIONS and native_library() is not None
