"""Rows times quantized weights, on a GPU: every weight is read as it is stored, and becomes a number in a register.

A program takes a block of output channels, a block of rows and a share of the inputs. The weights are the left operand
of the tensor cores, which may lie in registers, so each is made from its bits once, for all rows of the block. Several
programs share the inputs of one block of channels where the blocks alone would not fill the GPU; a second kernel adds
their sums in a fixed order, so the result does not depend on who finishes first. The shares depend on the weight's
shape and on the number of blocks, and not on the rows in them.

Bits become numbers two at a time, in the halves of a 32-bit word: four bits in the mantissa of a number whose unit is 1
count up from a power of two, which is then subtracted. The halves of a word hold weights that are not neighbours, so
the inputs are taken apart in the same order.
"""
# ruff: noqa: N803 (a kernel's constants are written in capitals)

from typing import Any, Literal, NamedTuple, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

_WORD = 4  # bytes
_GROUP = tl.constexpr(64)  # 4-bit weights that share a scale, as in ``Int4Linear``
_SUM_BLOCK = 1024


class _Blocks(NamedTuple):
    """The size of a program's work.

    Attributes:
        rows: Tensor cores multiply sixteen at least.
        channels: More of them, where there are more rows: each program reads its rows' inputs anew.
        bytes: Of weights, per channel and step.
        programs: The number to aim for: two per processor of a large GPU, or more where a program waits for memory.
    """

    rows: int
    channels: int
    bytes: int
    warps: int
    programs: int


_BLOCKS = (_Blocks(16, 64, 128, 4, 256), _Blocks(32, 128, 64, 4, 192), _Blocks(64, 128, 64, 8, 192))
_MANY_ROWS = _Blocks(128, 128, 64, 8, 192)
"""For 8-bit weights. With 4-bit ones, its four products would need more tensor memory than sm_100 has."""


def words_of(weight: Shaped[Tensor, "out bytes"]) -> Int32[Tensor, "out words"]:
    """Returns stored weights in words of four bytes: a view, unless a row ends within a word."""
    missing = -weight.shape[1] % _WORD
    return (F.pad(weight.view(torch.uint8), (0, missing)) if missing else weight).view(torch.int32)


def multiply(
    inputs: Float[Tensor, "row in"],
    words: Int32[Tensor, "out words"],
    scale: Float[Tensor, "..."],
    scheme: Literal["int4", "int8", "fp8"],
) -> Float[Tensor, "row out"]:
    """Returns inputs times dequantized weights, with sums in float32, in the inputs' dtype.

    Args:
        inputs: In bfloat16 or float16, contiguous.
        words: From ``words_of``: int8 or e4m3 numbers; or two 4-bit integers per byte, as in ``Int4Linear``.
        scale: One factor per output channel; of 4-bit integers, of shape (out, groups).
        scheme: What the weights are.
    """
    (rows, width), out, four_bits = inputs.shape, words.shape[0], scheme == "int4"
    sizes = _BLOCKS if four_bits else (*_BLOCKS, _MANY_ROWS)
    blocks = next((size for size in sizes if rows <= size.rows), sizes[-1])
    step = blocks.bytes * (2 if four_bits else 1)
    grid = triton.cdiv(rows, blocks.rows), triton.cdiv(out, blocks.channels)
    shares = _shares(grid[0] * grid[1], -(-width // step), blocks.programs)
    # One share needs no second kernel.
    sums = torch.empty(shares, rows, out, dtype=torch.float32 if shares > 1 else inputs.dtype, device=inputs.device)
    groups = scale.shape[1] if four_bits else 1
    constants: dict[str, Any] = {"WHOLE": width % step == 0, "SHARES": shares, "num_warps": blocks.warps}
    _product[(*grid, shares)](
        inputs, words, scale, sums, rows, width, out, words.shape[1], groups, SCHEME=scheme, BLOCK_ROWS=blocks.rows,
        BLOCK_OUT=blocks.channels, BLOCK_IN=step, **constants,
    )  # fmt: skip
    if shares == 1:
        return sums[0]
    outputs = torch.empty(rows, out, dtype=inputs.dtype, device=inputs.device)
    constants = {"SHARES": shares, "BLOCK": _SUM_BLOCK}
    _sum[(triton.cdiv(rows * out, _SUM_BLOCK),)](sums, outputs, rows * out, **constants)
    return outputs


def _shares(blocks: int, steps: int, programs: int) -> int:
    """Returns how many programs share the inputs of a block of output channels: a power of two, at most eight."""
    shares = 1
    while shares < 8 and blocks * shares < programs and shares * 2 <= steps:
        shares *= 2
    return shares


@triton.jit
@no_type_check
def _halves(words, dtype: tl.constexpr):
    """Returns the lower and the upper 16 bits of words as numbers side by side."""
    lower = words.to(tl.int16).to(dtype, bitcast=True)
    upper = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(lower, upper), (words.shape[0], 2 * words.shape[1]))


@triton.jit
@no_type_check
def _numbers(words, dtype: tl.constexpr, SCHEME: tl.constexpr):
    """Returns the numbers in the lowest four or eight bits of the halves of words. All are exact."""
    half: tl.constexpr = dtype == tl.float16
    if SCHEME == "int4":
        # 8 is stored for 0. The unit of bfloat16 is 1 from 128 on, and that of float16 from 1024 on.
        numbers = _halves((words & 0x000F000F) | (0x64006400 if half else 0x43004300), dtype)
        numbers -= 1032.0 if half else 136.0
    elif SCHEME == "int8":
        # With the sign bit flipped, 128 stands for 0. bfloat16 has no room for eight bits below its leading one.
        numbers = _halves((words & 0x00FF00FF) ^ 0x64806480, tl.float16) - 1152.0
        if not half:
            numbers = numbers.to(tl.float32).to(dtype)
    else:
        # e4m3's sign, exponent and mantissa at their places in a wider number, whose exponent counts from elsewhere.
        sign = (words << 8) & -0x7FFF8000
        numbers = _halves(sign | ((words & 0x007F007F) << (7 if half else 4)), dtype)
        numbers *= 2.0**8 if half else 2.0**120
    return numbers


@triton.jit(do_not_specialize=["rows"])  # not compiled anew for a single row
@no_type_check
def _product(
    inputs, words, scale, sums, rows, width, out, stored, groups, SCHEME: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Writes one share's sums for one block of rows and output channels to ``sums[share, row, out]``.

    ``WHOLE`` says that blocks divide the inputs, so that no load needs a mask for its columns.
    """
    in_word: tl.constexpr = 8 if SCHEME == "int4" else 4
    share = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channel = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real_row = row[:, None] < rows
    # Channels beyond the last one read it again, and are not written. In 64 bits: the weights of a large output layer
    # come near 2^31.
    readable = tl.minimum(channel, out - 1)[:, None]
    weights = words + readable.to(tl.int64) * stored
    values = inputs + row.to(tl.int64)[:, None] * width
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    dtype = inputs.dtype.element_ty
    for start in range(share * BLOCK_IN, width, SHARES * BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)[None, :]
        word = start // in_word + tl.arange(0, BLOCK_IN // in_word)[None, :]
        block = tl.load(values + column, mask=real_row & (WHOLE | (column < width)), other=0.0)
        bits = tl.load(weights + word, mask=WHOLE | (word < stored), other=0)
        even, odd = tl.split(tl.reshape(block, (BLOCK_ROWS, BLOCK_IN // 2, 2)))
        if SCHEME == "int4":
            group = start // _GROUP + tl.arange(0, BLOCK_IN // _GROUP)[None, :]
            factor = tl.load(scale + readable * groups + group, mask=WHOLE | (group < groups), other=0.0).to(dtype)
            spread = tl.broadcast_to(factor[:, :, None], (BLOCK_OUT, BLOCK_IN // _GROUP, _GROUP // 4))
            factors = tl.reshape(spread, (BLOCK_OUT, BLOCK_IN // 4))
            # A word holds weights 1, 0, 3, 2, 5, 4, 7, 6 from its lowest bits on: halves are four apart. Their products
            # with the scales are exact, because these have five significant bits (specdec/quantization/int4.py).
            second, fourth = tl.split(tl.reshape(odd, (BLOCK_ROWS, BLOCK_IN // 4, 2)))
            total = tl.dot(_numbers(bits, dtype, SCHEME) * factors, tl.trans(second), total)
            total = tl.dot(_numbers(bits >> 8, dtype, SCHEME) * factors, tl.trans(fourth), total)
            first, third = tl.split(tl.reshape(even, (BLOCK_ROWS, BLOCK_IN // 4, 2)))
            total = tl.dot(_numbers(bits >> 4, dtype, SCHEME) * factors, tl.trans(first), total)
            total = tl.dot(_numbers(bits >> 12, dtype, SCHEME) * factors, tl.trans(third), total)
        else:
            total = tl.dot(_numbers(bits, dtype, SCHEME), tl.trans(even), total)
            total = tl.dot(_numbers(bits >> 8, dtype, SCHEME), tl.trans(odd), total)
    real_channel = channel[:, None] < out
    if SCHEME != "int4":
        total *= tl.load(scale + readable).to(tl.float32)
    to = sums + (share * rows + row[None, :]).to(tl.int64) * out + channel[:, None]
    tl.store(to, total.to(sums.dtype.element_ty), mask=(row[None, :] < rows) & real_channel)


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
