"""A root mean square norm, with the residual that is added before it."""
# ruff: noqa: N803 (a kernel's constants are written in capitals)

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from specdec.kernels.rounding import rounded


def norm(
    x: Float[Tensor, "*row width"], weight: Float[Tensor, " width"] | None, eps: float, rounds: bool, offset: float
) -> Float[Tensor, "*row width"]:
    """Return ``x``, which has at most four axes, normalized.

    Args:
        x: What is normalized, row by row.
        weight: Factors; None for none.
        eps: Added to the mean of the squares.
        rounds: The normalized numbers are rounded to their dtype before they are multiplied by the weight (Llama), or
            only the products are (Gemma).
        offset: Added to the weight: Gemma's are distances from 1.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    output = torch.empty_like(x)
    _launch(x, x, weight, output, x, eps, rounds, offset, add=False)
    return output


def add_norm(
    x: Float[Tensor, "*row width"],
    residual: Float[Tensor, "*row width"],
    weight: Float[Tensor, " width"] | None,
    eps: float,
    rounds: bool,
    offset: float,
) -> tuple[Float[Tensor, "*row width"], Float[Tensor, "*row width"]]:
    """Return ``x + residual``, normalized, and the sum itself, which is rounded to its dtype before its norm."""
    x, residual = x.contiguous(), residual.contiguous()
    output, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, output, total, eps, rounds, offset, add=True)
    return output, total


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor | None, output: Tensor, total: Tensor, eps: float, rounds: bool,
    offset: float, *, add: bool,
) -> None:  # fmt: skip
    width, missing = x.shape[-1], 4 - x.dim()
    _, middle, inner = (1,) * missing + tuple(x.shape[:-1])
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        kernel: Any = norm_rows
        kernel[(x.numel() // width,)](
            x, residual, x if weight is None else weight, output, total, middle, inner, *(0,) * missing,
            *x.stride()[:-1], *(0,) * missing, *output.stride()[:-1], eps, WIDTH=width, BLOCK=block, ADD=add,
            WEIGHT=weight is not None, ROUND=rounds, OFFSET=offset, num_warps=min(16, max(1, block // 512)),
            enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["middle", "inner"])  # not compiled anew for other numbers of rows
@no_type_check
def norm_rows(
    x, residual, weight, output, total, middle, inner, outer_stride, middle_stride, inner_stride, outer_out,
    middle_out, inner_out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr,
    ROUND: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Normalizes one row, which stands in registers."""
    row = tl.program_id(0)
    last, rest = row % inner, row // inner
    second, first = rest % middle, (rest // middle).to(tl.int64)
    column = tl.arange(0, BLOCK)
    real = column < WIDTH
    place = first * outer_stride + second * middle_stride + last * inner_stride + column
    to = first * outer_out + second * middle_out + last * inner_out + column
    dtype: tl.constexpr = output.dtype.element_ty
    numbers = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    if ADD:
        numbers = rounded(numbers + tl.load(residual + place, mask=real, other=0.0).to(tl.float32), dtype)
        tl.store(total + to, numbers.to(dtype), mask=real)
    numbers = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / WIDTH + eps)
    if ROUND:
        numbers = rounded(numbers, dtype)
    if WEIGHT:
        numbers = numbers * (tl.load(weight + column, mask=real, other=0.0).to(tl.float32) + OFFSET)
    tl.store(output + to, rounded(numbers, dtype).to(dtype), mask=real)
