"""Refuses a scheme that would be slower than full precision on the model's device, and chooses one for a drafter.

A model is quantized to decode faster. Whether it does depends on the processor, so it is measured, where there is a
kernel at all: one row through a layer of the shape of the model's largest, quantized and not, in about a fifth of a
second. Small models are not measured: their weights stay in the caches, and what a scheme does to their outputs can be
studied anywhere.
"""

import time
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec.execution.products import panels
from specdec.machine import dtype_name
from specdec.native import chosen
from specdec.quantization.base import CUDA_DTYPES, QuantizedLinear
from specdec.quantization.checkpoint import METHODS

MEASURED_FROM = 1 << 22
"""Weights of the largest layer from which a model is measured; 4,096 x 1,024 in bfloat16 are eight megabytes."""
_AT_MOST = 1 << 21  # weights of the layer that is measured: quantizing more would take longer than the measurement
_ROWS_STEP = 64  # output channels come in multiples of this, as in most models
AUTO = "auto"  # as the quantization of a drafting model: ``fastest`` chooses
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


def check_fast(model: PreTrainedModel, name: str) -> None:
    """Refuse a scheme that the model's device has no kernel for, or whose kernel is slower than full precision.

    Only CPUs are measured. On a GPU the kernel is taken to be faster; where it does not run, a warning says so, and the
    weights still take less memory (``specdec.kernels.obstacle``). Raises ValueError: says why, with the figures.
    """
    reason = obstacle(name, model.dtype, model.device.type)
    if reason is not None:
        raise ValueError(f"quantization={name!r}: {reason}; {_REMEDY}")
    shape = largest_linear(model)
    if model.device.type != "cpu" or shape[0] * shape[1] < MEASURED_FROM:
        return
    for _ in range(2):  # once more before it is refused: the machine may be busy
        full, quantized = measure_row([name], shape, model.dtype).values()
        if quantized <= MARGIN * full:
            return
    dtype = dtype_name(model.dtype)
    raise ValueError(
        f"quantization={name!r} is slower than {dtype} on this machine: {_row(shape)} takes {quantized:.2f} ms, and "
        f"{full:.2f} ms in {dtype}; {_REMEDY}"
    )


def fastest(shape: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[str | None, str]:
    """Return the scheme in which a model drafts fastest (None: full precision), and what was measured, if anything.

    Measured on CPUs alone, once per machine, dtype and ``shape``, that of the model's largest layer. Fewer bits win
    only if they are faster by ``MARGIN``, and are so again.
    """
    if device != "cpu" or shape[0] * shape[1] < MEASURED_FROM or obstacle("int4", dtype, device) is not None:
        return None, ""
    said = chosen(f"drafts in {dtype_name(dtype)}: {_row(shape)}", partial(_fastest, shape, dtype), "")
    scheme = said.partition(":")[0]
    return scheme if scheme in METHODS else None, said


def _fastest(shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return the winner of two turns and the milliseconds of all in words; None if full precision wins one alone."""
    winners, times, full = set[str](), dict[str, float](), dtype_name(dtype)
    for _ in range(2):
        times = measure_row(("int8", "int4"), shape, dtype)
        winner = full
        for name, taken in times.items():
            winner = name if taken * MARGIN < times[winner] else winner
        winners.add(winner)
    figures = ", ".join(f"{taken:.2f} ms in {name}" for name, taken in times.items())
    if len(winners) > 1:  # of two quantized ones int8, whose drafts are better
        winner = None if full in winners else "int8"
    return winner and f"{winner}: {_row(shape)} takes {figures}"


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
def measure_row(names: Sequence[str], shape: tuple[int, int], dtype: torch.dtype) -> dict[str, float]:
    """Return the milliseconds of one row through a layer on one thread of the CPU, in full precision and in schemes.

    They are the least of some runs that take turns. Before every run the caches are filled with something else, as the
    other layers do in a model: so the weights come from memory.
    """
    out, width = _measured(shape)
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(out, width, generator=generator) / width**0.5).to(dtype)
    inputs = torch.randn(1, width, generator=generator).to(dtype)
    # The choice of the product is Python, which is no part of a captured forward.
    layers = {name: METHODS[name](weight, None) for name in names}
    found = [(partial(F.linear, inputs, weight), panels(weight))]
    found += [(partial(layer, inputs), layer.panels()) for layer in layers.values()]
    ways = [plain if packed is None else partial(packed, inputs, None) for plain, packed in found]
    other, least, threads = torch.ones(_CACHES), [float("inf")] * len(ways), torch.get_num_threads()
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
    return dict(zip((dtype_name(dtype), *names), (1000 * taken for taken in least), strict=True))


def _measured(shape: tuple[int, int]) -> tuple[int, int]:
    """Return the shape that is measured: a layer of more weights than are needed has fewer output channels."""
    return min(shape[0], max(_ROWS_STEP, _AT_MOST // shape[1] // _ROWS_STEP * _ROWS_STEP)), shape[1]


def _row(shape: tuple[int, int]) -> str:
    return "one row through {} x {} weights".format(*_measured(shape))
