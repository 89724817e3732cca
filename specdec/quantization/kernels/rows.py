"""Few rows times quantized weights, on a GPU: the weights are read once, as they are stored.

A program takes a block of output channels and a share of the inputs, dequantizes the weights in registers and
multiplies them with all rows at once. Several programs share the inputs of one block of channels, because the channels
alone would not fill the GPU; a second kernel adds their sums in a fixed order, so the result does not depend on who
finishes first. The shares depend on the weight's shape only, and not on the number of rows.
"""
# ruff: noqa: N803 (a kernel's constants are written in capitals)

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

BLOCK_OUT = 32
BLOCK_IN = 128
_LEAST_ROWS = 16  # tensor cores multiply sixteen rows or more
_PROGRAMS = 512
"""Programs to aim for: about four for each processor of a large GPU, so that loads of some overlap sums of others."""
_SUM_BLOCK = 1024


def multiply(
    inputs: Float[Tensor, "row in"],
    weight: Shaped[Tensor, "out stored"],
    scale: Float[Tensor, "..."],
    *,
    group: int | None = None,
) -> Float[Tensor, "row out"]:
    """Returns inputs times dequantized weights, with sums in float32, in the inputs' dtype.

    Args:
        inputs: In bfloat16 or float16, contiguous; up to some dozens of rows.
        weight: int8 or float8_e4m3fn numbers of shape (out, in); or with a ``group`` two 4-bit integers per byte, as
            in ``Int4Linear``.
        scale: One factor per output channel; or with a ``group`` of shape (out, groups).
        group: Weights that share a scale, for 4-bit integers: an even divisor of ``BLOCK_IN``.
    """
    rows, width = inputs.shape
    out = weight.shape[0]
    shares = _shares(out, width)
    # One share needs no second kernel.
    sums = torch.empty(shares, rows, out, dtype=torch.float32 if shares > 1 else inputs.dtype, device=inputs.device)
    constants: dict[str, Any] = {
        "GROUP": group or 0,
        "BLOCK_ROWS": max(_LEAST_ROWS, triton.next_power_of_2(rows)),
        "BLOCK_OUT": BLOCK_OUT,
        "BLOCK_IN": BLOCK_IN,
        "SHARES": shares,
    }
    _product[(triton.cdiv(out, BLOCK_OUT), shares)](
        inputs,
        weight,
        scale,
        sums,
        rows,
        width,
        out,
        stored=weight.shape[1],
        groups=scale.shape[1] if group is not None else 1,
        **constants,
    )
    if shares == 1:
        return sums[0]
    outputs = torch.empty(rows, out, dtype=inputs.dtype, device=inputs.device)
    constants = {"SHARES": shares, "BLOCK": _SUM_BLOCK}
    _sum[(triton.cdiv(rows * out, _SUM_BLOCK),)](sums, outputs, rows * out, **constants)
    return outputs


def _shares(out: int, width: int) -> int:
    """Returns how many programs share the inputs of a block of output channels: a power of two, at most eight."""
    blocks = triton.cdiv(out, BLOCK_OUT)
    shares = 1
    while shares < 8 and blocks * shares < _PROGRAMS and shares * 2 * BLOCK_IN <= width:
        shares *= 2
    return shares


@triton.jit(do_not_specialize=["rows"])  # not compiled anew for a single row
@no_type_check
def _product(
    inputs,
    weight,
    scale,
    sums,
    rows,
    width,
    out,
    stored,
    groups,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Writes one share's sums for one block of output channels to ``sums[share, row, out]``."""
    share = tl.program_id(1)
    row = tl.arange(0, BLOCK_ROWS)
    channel = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real_row = row[:, None] < rows
    real_channel = channel[:, None] < out
    # In 64 bits: the weights of a large output layer come near 2^31.
    weights = weight + channel.to(tl.int64)[:, None] * stored
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
    dtype = inputs.dtype.element_ty
    for start in range(share * BLOCK_IN, width, SHARES * BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        real = column[None, :] < width
        values = tl.load(inputs + row[:, None] * width + column[None, :], mask=real_row & real, other=0.0)
        if GROUP > 0:
            pair = start // 2 + tl.arange(0, BLOCK_IN // 2)
            bytes_ = tl.load(weights + pair[None, :], mask=real_channel & (pair[None, :] < stored), other=0x88)
            member = start // GROUP + tl.arange(0, BLOCK_IN // GROUP)
            factor = tl.load(
                scale + channel[:, None] * groups + member[None, :],
                mask=real_channel & (member[None, :] < groups),
                other=0.0,
            )
            spread = tl.broadcast_to(factor.to(tl.float32)[:, :, None], (BLOCK_OUT, BLOCK_IN // GROUP, GROUP // 2))
            factors = tl.reshape(spread, (BLOCK_OUT, BLOCK_IN // 2))
            # Exact: the scales have five significant bits (specdec/quantization/int4.py).
            even = (((bytes_ >> 4).to(tl.int32) - 8).to(tl.float32) * factors).to(dtype)
            odd = (((bytes_ & 15).to(tl.int32) - 8).to(tl.float32) * factors).to(dtype)
            left, right = tl.split(tl.reshape(values, (BLOCK_ROWS, BLOCK_IN // 2, 2)))
            total = tl.dot(left, tl.trans(even), total)
            total = tl.dot(right, tl.trans(odd), total)
        else:
            numbers = tl.load(weights + column[None, :], mask=real_channel & real, other=0.0).to(dtype)
            total = tl.dot(values, tl.trans(numbers), total)
    if GROUP == 0:
        total *= tl.load(scale + channel, mask=channel < out, other=0.0).to(tl.float32)[None, :]
    to = sums + (share * rows + row[:, None]).to(tl.int64) * out + channel[None, :]
    tl.store(to, total.to(sums.dtype.element_ty), mask=real_row & (channel[None, :] < out))


@triton.jit
@no_type_check
def _sum(sums, outputs, count, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the shares' sums one after the other."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = place < count
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for share in tl.static_range(SHARES):
        total += tl.load(sums + share * count + place, mask=real, other=0.0)
    tl.store(outputs + place, total.to(outputs.dtype.element_ty), mask=real)
