"""Refuses a scheme that would be slower than full precision on the model's device.

A model is quantized to decode faster. Whether it does depends on the processor, so it is measured, where there is a
kernel at all: one row through a layer of the shape of the model's largest, quantized and not. The check takes about a
fifth of a second. Small models are not measured: their weights stay in the caches, and what a scheme does to their
outputs can be studied anywhere.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec.execution.packing import can_pack, pack
from specdec.machine import dtype_name
from specdec.quantization.base import QuantizedLinear
from specdec.quantization.dispatch import DispatchedLinear
from specdec.quantization.methods import METHODS

MEASURED_FROM = 1 << 22
"""Weights of the largest layer from which a model is measured; 4,096 x 1,024 in bfloat16 are eight megabytes."""
_AT_MOST = 1 << 21  # weights of the layer that is measured: quantizing more would take longer than the measurement
_ROWS_STEP = 64  # output channels come in multiples of this, as in most models
_RUNS = 10
_CACHES = 16 << 20  # numbers of float32 that push everything else out of the processor's caches
MARGIN = 1.1
"""A scheme is refused if it takes a tenth longer than full precision. Less cannot be told from noise in so short a
time, and where several threads share the memory's bandwidth, fewer bytes count for more than in the one thread here."""
_REMEDY = "leave quantization out, or give quantization_check=false to have it all the same"
_CPU_DTYPES = (torch.float32, torch.bfloat16)
_CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def obstacle(name: str, dtype: torch.dtype, device: str) -> str | None:
    """Returns why a kind of device cannot run a scheme fast, as a clause; None if it has a kernel for it.

    Args:
        name: ``"int8"``, ``"int4"`` (also with ``_compact``) or ``"fp8"``; others are not judged.
    """
    scheme = name.removesuffix("_compact")
    if scheme not in ("int8", "int4", "fp8") or device == "meta":
        return None
    if scheme == "fp8" and device != "cuda":
        return f"fp8 weights need a GPU (CUDA), and this is a {device} device; int8 runs here"
    if device == "cuda":
        return None if dtype in _CUDA_DTYPES else f"there is no kernel for it in {dtype_name(dtype)}"
    if device != "cpu":
        return f"there is no kernel for it on {device} devices"
    if dtype not in _CPU_DTYPES:
        return f"on a CPU there is no kernel for it in {dtype_name(dtype)}, only in float32 and bfloat16"
    return None


@dataclass(frozen=True)
class RowTimes:
    """How long one row takes through a layer, in milliseconds.

    Attributes:
        full: In full precision, by its fastest product.
        quantized: With quantized weights.
        shape: The layer's output and input width.
    """

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
    measure = measure or measure_row
    times = measure(name, shape, model.dtype)
    if times.quantized > MARGIN * times.full:
        times = measure(name, shape, model.dtype)  # once more before it is refused: the machine may be busy
    if times.quantized > MARGIN * times.full:
        dtype = dtype_name(model.dtype)
        raise ValueError(
            f"quantization={name!r} is slower than {dtype} on this machine: one row through {times.shape[0]} x "
            f"{times.shape[1]} weights takes {times.quantized:.2f} ms, and {times.full:.2f} ms in {dtype}; {_REMEDY}"
        )


def largest_linear(model: nn.Module) -> tuple[int, int]:
    """Returns the output and input width of a model's largest linear layer, quantized or not; (0, 0) without any."""
    found = [(0, 0)]
    for module in model.modules():
        if isinstance(module, nn.Linear | QuantizedLinear):
            found.append((module.out_features, module.in_features))
        elif isinstance(module, Conv1D):
            found.append((module.weight.shape[1], module.weight.shape[0]))
    return max(found, key=lambda shape: shape[0] * shape[1])


def measure_row(name: str, shape: tuple[int, int], dtype: torch.dtype) -> RowTimes:
    """Returns how long one row takes through a layer on one thread of the CPU, the least of some runs that take turns.

    Several threads would wait for each other on a busy machine, for longer than the product takes.

    A layer of more weights than are needed for the comparison is measured with fewer output channels. Before every run
    the caches are filled with something else, as the other layers do in a model: so the weights come from memory.
    """
    out, width = shape
    out = min(out, max(_ROWS_STEP, _AT_MOST // width // _ROWS_STEP * _ROWS_STEP))
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(out, width, generator=generator) / width**0.5).to(dtype)
    inputs = torch.randn(1, width, generator=generator).to(dtype)
    layer = METHODS[name](weight, None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _timed(layer, weight, inputs)
    finally:
        torch.set_num_threads(threads)


def _timed(layer: DispatchedLinear, weight: Tensor, inputs: Tensor) -> RowTimes:
    other = torch.ones(_CACHES)
    with torch.inference_mode():
        packed = pack(weight) if can_pack(weight) else None
        row = layer.panels()
        form = layer.form_for(1) if row is None else None

        def full() -> Tensor:
            return F.linear(inputs, weight) if packed is None else packed(inputs, None)

        def quantized() -> Tensor:
            # The choice of the product is Python, which is no part of a captured forward.
            if row is not None:
                return row(inputs, None)
            return layer(inputs) if form is None else layer.by_kernel(inputs, form)

        least = [float("inf")] * 2
        for run in range(_RUNS + 1):
            for side, product in enumerate((full, quantized)):
                other.sum()
                start = time.perf_counter()
                product()
                if run:  # the first one warms up
                    least[side] = min(least[side], time.perf_counter() - start)
    return RowTimes(1000 * least[0], 1000 * least[1], (weight.shape[0], weight.shape[1]))
