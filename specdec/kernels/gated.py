"""An activation of one product times another product: the middle of a gated feed-forward network."""
# ruff: noqa: N803 (a kernel's constants are written in capitals)

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from specdec.kernels.rounding import rounded

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_BLOCK = 1024


def gated(gate: Float[Tensor, "*row width"], up: Float[Tensor, "*row width"], activation: str) -> Tensor:
    """Return ``activation(gate) * up``, in order of its axes; the activation is rounded to its dtype."""
    width = gate.shape[-1]
    gate_rows, up_rows = _rows(gate), _rows(up)
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    with torch.cuda.device_of(gate):  # Triton launches on the current device
        kernel: Any = gate_row
        kernel[(gate_rows.shape[0], triton.cdiv(width, _BLOCK))](
            gate_rows, up_rows, output, gate_rows.stride(0), up_rows.stride(0), WIDTH=width, BLOCK=_BLOCK,
            ACTIVATION=ACTIVATIONS[activation], num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return output


def _rows(tensor: Tensor) -> Float[Tensor, "row width"]:
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor.reshape(-1, tensor.shape[-1])


@triton.jit
@no_type_check
def gate_row(
    gate,
    up,
    output,
    gate_stride,
    up_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Computes a block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < WIDTH
    x = tl.load(gate + row * gate_stride + column, mask=real, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        active = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == 1:
        active = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        small = tl.exp(-2.0 * tl.abs(inner))
        tanh = (1.0 - small) / (1.0 + small)
        active = 0.5 * x * (1.0 + tl.where(inner < 0, -tanh, tanh))
    dtype: tl.constexpr = output.dtype.element_ty
    factor = tl.load(up + row * up_stride + column, mask=real, other=0.0).to(tl.float32)
    product = rounded(rounded(active, dtype) * factor, dtype)
    tl.store(output + row * WIDTH + column, product.to(dtype), mask=real)
