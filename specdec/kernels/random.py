"""The random numbers of ``specdec.random.uniforms`` in one launch, instead of one for each of a hash's steps."""
# ruff: noqa: N803 (a kernel's constants are written in capitals)

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_BLOCK = 1024


def uniforms(
    keys: Int[Tensor, " batch"],
    rounds: Int[Tensor, " batch"],
    counters: Int[Tensor, " index"],
    multipliers: tuple[int, int, int],
    bits: int,
) -> Float[Tensor, "batch index"]:
    """Returns a number in [0, 1) of so many bits for every row and counter; ``multipliers`` are the hash's."""
    batch, count = len(keys), len(counters)
    numbers = torch.empty(batch, count, dtype=torch.float64, device=keys.device)
    _uniforms[(triton.cdiv(batch * count, _BLOCK),)](
        keys, rounds, counters, numbers, batch * count, count, keys.stride(0), rounds.stride(0),
        *multipliers, bits, _BLOCK,
    )  # fmt: skip
    return numbers


@triton.jit
@no_type_check
def _mix(x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return a hash of every integer; the masks make arithmetic shifts logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
@no_type_check
def _uniforms(
    keys, rounds, counters, numbers, total, count, key_stride, round_stride,
    GAMMA: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a block of numbers."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    row = index // count
    key = tl.load(keys + row * key_stride, mask=inside, other=0)
    state = _mix(key + tl.load(rounds + row * round_stride, mask=inside, other=0) * GAMMA, FIRST, SECOND)
    bits = _mix(state + tl.load(counters + index - row * count, mask=inside, other=0), FIRST, SECOND)
    number = ((bits >> (64 - BITS)) & ((1 << BITS) - 1)).to(tl.float64)
    tl.store(numbers + index, number / (1 << BITS), mask=inside)
