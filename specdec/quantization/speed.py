"""Refuses a scheme that would be slower than full precision on the model's device.

A model is quantized to decode faster. Whether it does depends on the processor, so it is measured, where there is a
kernel at all: one row through a layer of the shape of the model's largest, quantized and not, in about a fifth of a
second. Small models are not measured: their weights stay in the caches, and what a scheme does to their outputs can be
studied anywhere.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec.execution.products import panels
from specdec.machine import dtype_name
from specdec.quantization.base import CUDA_DTYPES, QuantizedLinear
from specdec.quantization.checkpoint import METHODS

MEASURED_FROM = 1 << 22
"""Weights of the largest layer from which a model is measured; 4,096 x 1,024 in bfloat16 are eight megabytes."""
_AT_MOST = 1 << 21  # weights of the layer that is measured: quantizing more would take longer than the measurement
_ROWS_STEP = 64  # output channels come in multiples of this, as in most models
_RUNS = 10
_CACHES = 16 << 20  # numbers of float32 that push everything else out of the processor's caches
MARGIN = 1.1
"""A scheme is refused if it takes a tenth longer than full precision: less cannot be told from noise."""
_REMEDY = "leave quantization out, or give quantization_check=false to have it all the same"


def obstacle(name: str, dtype: torch.dtype, device: str) -> str | None:
    """Return why a kind of device has no kernel for a scheme (a name in ``METHODS``), as a clause; None if it has."""
    if device == "meta":
        return None
    if name == "fp8" and device != "cuda":
        return f"fp8 weights need a GPU (CUDA), and this is a {device} device; int8 runs here"
    if device not in ("cuda", "cpu"):
        return f"there is no kernel for it on {device} devices"
    dtypes = CUDA_DTYPES if device == "cuda" else (torch.float32, torch.bfloat16)
    return None if dtype in dtypes else f"there is no kernel for it in {dtype_name(dtype)} on a {device} device"


class RowTimes(NamedTuple):
    """Milliseconds of a row through a layer of a shape ``(out, in)`` in full precision, at best, and quantized."""

    full: float
    quantized: float
    shape: tuple[int, int]


def check_fast(
    model: PreTrainedModel,
    name: str,
    *,
    device: str | None = None,
    measure: Callable[[str, tuple[int, int], torch.dtype], RowTimes] | None = None,
) -> None:
    """Refuse a scheme that the model's device has no kernel for, or whose kernel is slower than full precision.

    Only CPUs are measured. On a GPU the kernel is taken to be faster; where it does not run, a warning says so, and the
    weights still take less memory (``specdec.kernels.obstacle``).

    Args:
        device: The kind of device; None for the model's.
        measure: Returns the times of a layer in a scheme, a shape and a dtype; ``measure_row`` by default.

    Raises:
        ValueError: Says why, with the figures, and what to do.
    """
    reason = obstacle(name, model.dtype, device or model.device.type)
    if reason is not None:
        raise ValueError(f"quantization={name!r}: {reason}; {_REMEDY}")
    shape = largest_linear(model)
    if model.device.type != "cpu" or shape[0] * shape[1] < MEASURED_FROM:
        return
    for _ in range(2):  # once more before it is refused: the machine may be busy
        times = (measure or measure_row)(name, shape, model.dtype)
        if times.quantized <= MARGIN * times.full:
            return
    dtype = dtype_name(model.dtype)
    raise ValueError(
        f"quantization={name!r} is slower than {dtype} on this machine: one row through {times.shape[0]} x "
        f"{times.shape[1]} weights takes {times.quantized:.2f} ms, and {times.full:.2f} ms in {dtype}; {_REMEDY}"
    )


def largest_linear(model: nn.Module) -> tuple[int, int]:
    """Return the output and input width of a model's largest linear layer, quantized or not; (0, 0) without any."""
    shapes = [(0, 0)]
    for module in model.modules():
        if isinstance(module, nn.Linear | QuantizedLinear):
            shapes.append((module.out_features, module.in_features))
        elif isinstance(module, Conv1D):
            shapes.append((module.weight.shape[1], module.weight.shape[0]))
    return max(shapes, key=lambda shape: shape[0] * shape[1])


@torch.inference_mode()
def measure_row(name: str, shape: tuple[int, int], dtype: torch.dtype) -> RowTimes:
    """Return how long one row takes through a layer on one thread of the CPU, the least of some runs that take turns.

    A layer of more weights than are needed is measured with fewer output channels. Before every run the caches are
    filled with something else, as the other layers do in a model: so the weights come from memory.
    """
    out, width = shape
    out = min(out, max(_ROWS_STEP, _AT_MOST // width // _ROWS_STEP * _ROWS_STEP))
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(out, width, generator=generator) / width**0.5).to(dtype)
    inputs = torch.randn(1, width, generator=generator).to(dtype)
    layer = METHODS[name](weight, None)
    full = panels(weight)
    # The choice of the product is Python, which is no part of a captured forward.
    ways = [
        partial(F.linear, inputs, weight) if full is None else partial(full, inputs, None),
        partial(layer, inputs) if (packed := layer.panels()) is None else partial(packed, inputs, None),
    ]
    other, least, threads = torch.ones(_CACHES), [float("inf")] * 2, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for run in range(_RUNS + 1):
            for side, product in enumerate(ways):
                other.sum()
                start = time.perf_counter()
                product()
                if run:  # the first one warms up
                    least[side] = min(least[side], time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return RowTimes(1000 * least[0], 1000 * least[1], (out, width))
