"""One launch from logits to what tokens are drawn from, without sorting (``specdec.sampling.distribution``).

A program takes one row. Which tokens stay is said by two numbers: those above some logit, and of those that equal it
the ones with the lowest ids. Top-k asks for the smallest logit with fewer than k above it, top-p for the smallest one
with less than p above it. Both are found by bisection over the bits of a float, where every step jumps to a logit that
the row has: so it ends when no other one is left between, after about twenty passes over the row, which lies in the
cache by then. Mass is counted in integers, so that no sum depends on its order.
"""
# ruff: noqa: N803 (a kernel's constants are written in capitals)

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_BLOCK = 4096
_UNIT = tl.constexpr(2.0**40)  # the mass of the most probable token; at most 2**22 of them fit into an integer
_NEGLIGIBLE = tl.constexpr(29.0)  # a token that is less probable by so many nats has no mass in integers
_LEAST = tl.constexpr(-(2**31))
_MOST = tl.constexpr(2**31 - 1)


def distribution(
    logits: Float[Tensor, "batch node vocab"],
    temperature: Float[Tensor, " batch"],
    top_k: Int[Tensor, " batch"],
    top_p: Float[Tensor, " batch"],
    min_p: Float[Tensor, " batch"],
) -> Float[Tensor, "batch node vocab"]:
    """Returns what tokens are drawn from at every node, in float32: one-hot where the temperature is 0.

    A row whose largest logit is not finite, or that has NaN, is NaN throughout.
    """
    if logits.stride(2) != 1 or logits.dtype == torch.float64:
        logits = logits.float().contiguous()
    batch, nodes, vocab = logits.shape
    probs = torch.empty(batch, nodes, vocab, dtype=torch.float32, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    options: dict[str, Any] = {"BLOCK": block, "num_warps": 16 if block == _BLOCK else 4}
    _distribution[(batch * nodes,)](
        logits, temperature, top_k, top_p, min_p, probs, nodes, vocab, logits.stride(0), logits.stride(1), **options
    )
    return probs


@triton.jit
@no_type_check
def _key(value):
    """Return integers that are ordered as the numbers are; both zeros are equal."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
@no_type_check
def _scaled(row, start, vocab, temperature, BLOCK: tl.constexpr):
    """Return a block of ids, and the logits at this temperature; minus infinity behind the row's end."""
    index = start + tl.arange(0, BLOCK)
    value = tl.load(row + index, mask=index < vocab, other=-float("inf")).to(tl.float32)
    return index, tl.div_rn(value, temperature)


@triton.jit
@no_type_check
def _above(row, vocab, temperature, top, key, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many tokens, or how much mass, is above a key; the largest of the other keys, and the next one."""
    total = tl.zeros([BLOCK], tl.int64)
    below = tl.full([BLOCK], _LEAST, tl.int32)
    following = tl.full([BLOCK], _MOST, tl.int32)
    for start in range(0, vocab, BLOCK):
        index, value = _scaled(row, start, vocab, temperature, BLOCK)
        keys = _key(value)
        above = (keys > key) & (index < vocab)
        if BY_MASS:
            total += tl.where(above, tl.exp(value - top) * _UNIT + 0.5, 0.0).to(tl.int64)
        else:
            total += above.to(tl.int64)
        below = tl.maximum(below, tl.where(above | (index >= vocab), _LEAST, keys))
        following = tl.minimum(following, tl.where(above, keys, _MOST))
    return tl.sum(total), tl.max(below), tl.min(following)


@triton.jit
@no_type_check
def _least(row, vocab, temperature, top, low, limit, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest key with less than ``limit`` above it, and what is above it. No key up to ``low`` is one."""
    high = _key(top).to(tl.int64)
    above = tl.zeros([], tl.int64)
    low = low.to(tl.int64)
    while low < high - 1:
        middle = (low + high) >> 1
        found, below, following = _above(row, vocab, temperature, top, middle.to(tl.int32), BY_MASS, BLOCK)
        if found < limit:
            high, above = below.to(tl.int64), found
        else:
            low = following.to(tl.int64) - 1
    return high.to(tl.int32), above


@triton.jit
@no_type_check
def _end_of_ties(row, vocab, temperature, key, room, BLOCK: tl.constexpr):
    """Return an id below which ``room`` tokens have this key; ``vocab`` if no more have it."""
    end = tl.full([], vocab, tl.int32)
    before = tl.zeros([], tl.int64)
    for start in range(0, vocab, BLOCK):
        index, value = _scaled(row, start, vocab, temperature, BLOCK)
        equal = ((_key(value) == key) & (index < vocab)).to(tl.int64)
        number = before + tl.cumsum(equal, 0)
        end = tl.minimum(end, tl.min(tl.where((equal > 0) & (number > room), index, vocab)))
        before += tl.sum(equal)
    return end


@triton.jit
@no_type_check
def _distribution(
    logits, temperatures, top_ks, top_ps, min_ps, probs, nodes, vocab, batch_stride, node_stride, BLOCK: tl.constexpr
):
    """Write one row's probabilities."""
    number = tl.program_id(0).to(tl.int64)
    batch = number // nodes
    row = logits + batch * batch_stride + (number - batch * nodes) * node_stride
    out = probs + number * vocab
    temperature = tl.load(temperatures + batch)
    greedy = temperature == 0
    temperature = tl.where(greedy, 1.0, temperature)

    # The largest logit, and the first token that has it; NaN counts as larger than all numbers.
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        index, value = _scaled(row, start, vocab, temperature, BLOCK)
        wrong |= (value != value).to(tl.int32)
        best = tl.maximum(best, tl.where(value != value, -float("inf"), value))
    top = tl.max(best)
    not_a_number = tl.max(wrong) > 0
    usable = (tl.abs(top) < float("inf")) & (not_a_number == 0)

    if greedy:
        first = tl.full([], vocab, tl.int32)
        for start in range(0, vocab, BLOCK):
            index, value = _scaled(row, start, vocab, temperature, BLOCK)
            here = tl.where(not_a_number, value != value, value == top) & (index < vocab)
            first = tl.minimum(first, tl.min(tl.where(here, index, vocab)))
        for start in range(0, vocab, BLOCK):
            index = start + tl.arange(0, BLOCK)
            tl.store(out + index, (index == first).to(tl.float32), mask=index < vocab)
    elif usable == 0:
        for start in range(0, vocab, BLOCK):
            index = start + tl.arange(0, BLOCK)
            tl.store(out + index, tl.full([BLOCK], float("nan"), tl.float32), mask=index < vocab)
    else:
        key = tl.full([], _LEAST, tl.int32)
        end = tl.full([], vocab, tl.int32)
        top_k = tl.load(top_ks + batch)
        top_p = tl.load(top_ps + batch)
        ties = tl.zeros([], tl.int64)  # of those that equal the last logit, how many top-k keeps; 0 without top-k
        if (top_k > 0) & (top_k < vocab):
            key, above = _least(row, vocab, temperature, top, key, top_k, False, BLOCK)
            ties = top_k - above
            end = _end_of_ties(row, vocab, temperature, key, ties, BLOCK)
        if top_p < 1:
            whole, _, _ = _above(row, vocab, temperature, top, key, True, BLOCK)
            low = _key(top - _NEGLIGIBLE)
            if ties > 0:
                last = key ^ ((key >> 31) & 0x7FFFFFFF)
                each = (tl.exp(last.to(tl.float32, bitcast=True) - top) * _UNIT + 0.5).to(tl.int64)
                whole += each * ties
                low = tl.maximum(low, key - 1)
            limit = tl.ceil(top_p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
            last_key, above = _least(row, vocab, temperature, top, low, limit, True, BLOCK)
            last = last_key ^ ((last_key >> 31) & 0x7FFFFFFF)
            each = (tl.exp(last.to(tl.float32, bitcast=True) - top) * _UNIT + 0.5).to(tl.int64)
            room = (limit - above + each - 1) // each
            if (last_key == key) & (ties > 0):
                room = tl.minimum(room, ties)
            key = last_key
            end = _end_of_ties(row, vocab, temperature, key, room, BLOCK)
        total = _total(row, vocab, temperature, top, key, end, 0.0, 1.0, BLOCK)
        min_p = tl.load(min_ps + batch)
        floor = min_p * tl.div_rn(1.0, total)
        scale = total
        if min_p > 0:
            scale = _total(row, vocab, temperature, top, key, end, floor, total, BLOCK)
        for start in range(0, vocab, BLOCK):
            index, weight = _kept(row, start, vocab, temperature, top, key, end, floor, total, BLOCK)
            tl.store(out + index, tl.div_rn(weight, scale), mask=index < vocab)


@triton.jit
@no_type_check
def _kept(row, start, vocab, temperature, top, key, end, floor, total, BLOCK: tl.constexpr):
    """Return a block of ids and weights: 0 for those that do not stay, or that are less than ``floor`` of ``total``."""
    index, value = _scaled(row, start, vocab, temperature, BLOCK)
    keys = _key(value)
    stays = (keys > key) | ((keys == key) & (index < end))
    weight = tl.where(stays, tl.exp(value - top), 0.0)
    return index, tl.where(tl.div_rn(weight, total) >= floor, weight, 0.0)


@triton.jit
@no_type_check
def _total(row, vocab, temperature, top, key, end, floor, total, BLOCK: tl.constexpr):
    """Return the sum of the weights that stay."""
    weights = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        _, weight = _kept(row, start, vocab, temperature, top, key, end, floor, total, BLOCK)
        weights += weight
    return tl.sum(weights)
