"""A few launches from logits to what tokens are drawn from, without sorting (``specdec.sampling.distribution``).

Rows are cut into pieces, of which each has a program: a single row fills a GPU. Which tokens stay is said by two
numbers: those above some logit, and of those that equal it the ones with the lowest ids. Top-k asks for the smallest
logit with fewer than k above it, top-p for the smallest one with less than p above it. Both are found by a search over
the bits of a float. A launch looks at fifteen places between the bounds at once, so eight of them find any one of 2^32.
What a launch has counted, piece by piece, is added up by the programs of the next. Mass is counted in integers, so that
no such sum depends on its order.
"""
# ruff: noqa: N803 (a kernel's constants are written in capitals)

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_PIECE = 4096
_COLUMNS = 512  # of a piece that are compared with all places at a time
_STEPS = 8
_WAYS = tl.constexpr(16)  # parts that a step cuts the bounds into; _WAYS ** _STEPS is 2 ** 32
_UNIT = tl.constexpr(2.0**40)  # the mass of the most probable token; at most 2**22 of them fit into an integer
_NEGLIGIBLE = tl.constexpr(29.0)  # a token that is less probable by so many nats has no mass in integers
_LEAST = tl.constexpr(-(2**31))
_FEW = {"num_warps": 1}


def distribution(
    logits: Float[Tensor, "batch node vocab"],
    temperature: Float[Tensor, " batch"],
    top_k: Int[Tensor, " batch"],
    top_p: Float[Tensor, " batch"],
    min_p: Float[Tensor, " batch"],
    *,
    any_top_k: bool = True,
    any_top_p: bool = True,
    any_min_p: bool = True,
) -> Float[Tensor, "batch node vocab"]:
    """Returns what tokens are drawn from at every node, in float32: one-hot where the temperature is 0.

    A row whose largest logit is not finite, or that has NaN, is NaN throughout.

    Args:
        any_top_k: Whether any row may use top-k; where none does, the launches for it are left out.
        any_top_p: The same of top-p.
        any_min_p: The same of min-p.
    """
    if logits.stride(2) != 1 or logits.dtype == torch.float64:
        logits = logits.float().contiguous()
    (batch, nodes, vocab), device = logits.shape, logits.device
    rows, block = batch * nodes, min(_PIECE, triton.next_power_of_2(vocab))
    pieces = triton.cdiv(vocab, block)
    probs = torch.empty(batch, nodes, vocab, dtype=torch.float32, device=device)
    largest, sums = torch.empty(2, rows, pieces, dtype=torch.float32, device=device)
    first = torch.empty(2, rows, pieces, dtype=torch.int32, device=device)
    top, row = torch.empty(rows, device=device), torch.empty(rows, 2, dtype=torch.int32, device=device)
    cut = torch.empty(rows, 2, dtype=torch.int64, device=device)
    given = logits, temperature, nodes, vocab, logits.stride(0), logits.stride(1)
    whole: dict[str, Any] = {"PIECE": block, "num_warps": 8 if block == _PIECE else 4}
    few: dict[str, Any] = {"PIECES": triton.next_power_of_2(pieces), **_FEW}
    each, of_all = (rows,), (rows, pieces)
    _tops[of_all](*given, largest, first, pieces, rows, **whole)
    _begin[each](temperature, largest, first, top, row, cut, nodes, vocab, pieces, rows, **few)
    chosen = [by_mass for by_mass, wanted in ((False, any_top_k), (True, any_top_p)) if wanted]
    if chosen:
        found = torch.empty(2, rows, pieces, _WAYS.value, dtype=torch.int64, device=device)
        bounds = torch.empty(_STEPS, rows, 3, dtype=torch.int64, device=device)
        searched = top_k, top_p, top, row, cut, bounds, found
        equal = torch.empty(rows, pieces, dtype=torch.int32, device=device)
        sizes = {**whole, "COLUMNS": min(_COLUMNS, block), "PIECES": few["PIECES"]}
        for by_mass in chosen:
            for step in range(_STEPS):
                _narrow[of_all](*given, *searched, step, pieces, rows, BY_MASS=by_mass, **sizes)
            _settle[each](*searched, _STEPS, nodes, vocab, pieces, rows, BY_MASS=by_mass, **few)
        _count_equal[of_all](*given, cut, equal, pieces, **whole)
    else:
        equal = first  # which nobody reads
    kept = {**whole, "PIECES": few["PIECES"]}
    _weigh[of_all](*given, top, row, cut, equal, probs, sums, pieces, FILTERED=bool(chosen), **kept)
    if any_min_p:
        _drop[of_all](probs, min_p, sums, largest, nodes, vocab, pieces, **kept)
        sums = largest
    _normalize[of_all](probs, sums, row, vocab, pieces, **kept)
    return probs


@triton.jit
@no_type_check
def _key(value):
    """Return integers that are ordered as the numbers are; both zeros are equal."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
@no_type_check
def _mass(value, top):
    """Return the mass of tokens in integers."""
    return (tl.exp(value - top) * _UNIT + 0.5).to(tl.int64)


@triton.jit
@no_type_check
def _scaled(logits, temperatures, nodes, vocab, batch_stride, node_stride, start, PIECE: tl.constexpr):
    """Return ids of this program's row from ``start`` on, and its logits; minus infinity behind the row's end."""
    number = tl.program_id(0).to(tl.int64)
    batch = number // nodes
    row = logits + batch * batch_stride + (number - batch * nodes) * node_stride
    temperature = tl.load(temperatures + batch)
    index = start + tl.arange(0, PIECE)
    value = tl.load(row + index, mask=index < vocab, other=-float("inf")).to(tl.float32)
    return index, tl.div_rn(value, tl.where(temperature == 0, 1.0, temperature))


@triton.jit(do_not_specialize=["pieces", "rows"])
@no_type_check
def _tops(
    logits, temperatures, nodes, vocab, batch_stride, node_stride, largest, first, pieces, rows, PIECE: tl.constexpr
):
    """Write a piece's largest logit, the first token that has it, and the first that is not a number."""
    piece = tl.program_id(1)
    index, value = _scaled(logits, temperatures, nodes, vocab, batch_stride, node_stride, piece * PIECE, PIECE)
    best = tl.max(tl.where(value != value, -float("inf"), value))
    at = tl.program_id(0).to(tl.int64) * pieces + piece
    tl.store(largest + at, best)
    tl.store(first + at, tl.min(tl.where((value == best) & (index < vocab), index, vocab)))
    tl.store(first + rows.to(tl.int64) * pieces + at, tl.min(tl.where(value != value, index, vocab)))


@triton.jit(do_not_specialize=["pieces", "rows"])
@no_type_check
def _begin(temperatures, largest, first, top, row, cut, nodes, vocab, pieces, rows, PIECES: tl.constexpr):
    """Write a row's largest logit; what it is and its first token; and that all of its tokens stay.

    It is 0 where the row is greedy, 1 where it is drawn from, and -1 where its logits are of no use. NaN counts as
    larger than all numbers.
    """
    number = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    at, real = number * pieces + piece, piece < pieces
    values = tl.load(largest + at, mask=real, other=-float("inf"))
    best = tl.max(values)
    index = tl.load(first + at, mask=real, other=vocab)
    wrong = tl.min(tl.load(first + rows.to(tl.int64) * pieces + at, mask=real, other=vocab))
    usable = (tl.abs(best) < float("inf")) & (wrong == vocab)
    greedy = tl.load(temperatures + number // nodes) == 0
    tl.store(top + number, best)
    tl.store(row + 2 * number, tl.where(greedy, 0, tl.where(usable, 1, -1)))
    tl.store(row + 2 * number + 1, tl.where(wrong < vocab, wrong, tl.min(tl.where(values == best, index, vocab))))
    tl.store(cut + 2 * number, _LEAST)
    tl.store(cut + 2 * number + 1, vocab)


@triton.jit
@no_type_check
def _wanted(top_ks, top_ps, row, nodes, vocab, BY_MASS: tl.constexpr):
    """Return whether this program's row is searched, and for what: its k or p."""
    number = tl.program_id(0).to(tl.int64)
    drawn = tl.load(row + 2 * number) == 1
    if BY_MASS:
        wanted = tl.load(top_ps + number // nodes)
        return drawn & (wanted < 1), wanted
    else:  # noqa: RET505 (the branch that is not taken is not compiled)
        wanted = tl.load(top_ks + number // nodes)
        return drawn & (wanted > 0) & (wanted < vocab), wanted


@triton.jit
@no_type_check
def _limit(wanted, above_cut, top, key, room, BY_MASS: tl.constexpr):
    """Return how many tokens, or how much mass, may be above the logit that is looked for: less than this."""
    if BY_MASS:
        cut = key != _LEAST
        whole = above_cut + tl.where(cut, _mass(tl.where(cut, _number(key), top), top) * room, 0)
        limit = tl.ceil(wanted.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
        return tl.maximum(limit, 1)  # p may be so small that it is 0 in float32
    else:  # noqa: RET505
        return wanted.to(tl.int64)


@triton.jit
@no_type_check
def _number(key):
    """Return the number whose key this is."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _narrowed(wanted, top, cut, bounds, found, step, pieces, rows, BY_MASS: tl.constexpr, PIECES: tl.constexpr):
    """Return the bounds that ``step`` launches have left, what is above the upper one, and the limit.

    No key up to the lower one has so little above it; the upper one has.
    """
    number = tl.program_id(0).to(tl.int64)
    key, room = tl.load(cut + 2 * number), tl.load(cut + 2 * number + 1)
    high, above, limit = _key(top).to(tl.int64), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    low = tl.full([], _LEAST, tl.int64)
    if BY_MASS:
        low = tl.maximum(_key(top - _NEGLIGIBLE).to(tl.int64), tl.where(key == _LEAST, key, key - 1))
    if step > 0:
        last = step - 1
        if last > 0:
            at = bounds + ((last - 1).to(tl.int64) * rows + number) * 3
            low, high, above = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        way, piece = tl.arange(0, _WAYS), tl.arange(0, PIECES)
        at = found + (((last % 2).to(tl.int64) * rows + number) * pieces + piece[:, None]) * _WAYS + way[None, :]
        sums = tl.sum(tl.load(at, mask=(piece < pieces)[:, None], other=0), 0)
        limit = _limit(wanted, tl.sum(tl.where(way == _WAYS - 1, sums, 0)), top, key, room, BY_MASS)
        chosen = tl.min(tl.where((sums < limit) & (way < _WAYS - 1), way, _WAYS - 1)).to(tl.int64)
        above = tl.where(chosen < _WAYS - 1, tl.sum(tl.where(way == chosen, sums, 0)), above)
        size = high - low
        high = low + (chosen + 1) * size // _WAYS
        low = low + chosen * size // _WAYS
    return low, high, above, limit


@triton.jit(do_not_specialize=["step", "pieces", "rows"])
@no_type_check
def _narrow(
    logits, temperatures, nodes, vocab, batch_stride, node_stride, top_ks, top_ps, top, row, cut, bounds, found,
    step, pieces, rows, BY_MASS: tl.constexpr, PIECE: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Write how many tokens of a piece, or how much mass, are above places between the bounds, and above the cut."""
    searched, wanted = _wanted(top_ks, top_ps, row, nodes, vocab, BY_MASS)
    if searched:
        number, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
        best = tl.load(top + number)
        low, high, above, _ = _narrowed(wanted, best, cut, bounds, found, step, pieces, rows, BY_MASS, PIECES)
        if (piece == 0) & (step > 0):
            at = bounds + ((step - 1).to(tl.int64) * rows + number) * 3
            tl.store(at, low)
            tl.store(at + 1, high)
            tl.store(at + 2, above)
        way = tl.arange(0, _WAYS)
        places = low + (way + 1).to(tl.int64) * (high - low) // _WAYS
        places = tl.where(way == _WAYS - 1, tl.load(cut + 2 * number), places).to(tl.int32)
        total = tl.zeros([_WAYS, COLUMNS], tl.int64)
        for start in range(0, PIECE, COLUMNS):
            index, value = _scaled(
                logits, temperatures, nodes, vocab, batch_stride, node_stride, piece * PIECE + start, COLUMNS
            )
            counted = (index < vocab).to(tl.int64)
            if BY_MASS:
                counted *= _mass(value, best)
            total += tl.where(_key(value)[None, :] > places[:, None], counted[None, :], 0)
        at = found + (((step % 2).to(tl.int64) * rows + number) * pieces + piece) * _WAYS + way
        tl.store(at, tl.sum(total, 1))


@triton.jit(do_not_specialize=["step", "pieces", "rows"])
@no_type_check
def _settle(
    top_ks, top_ps, top, row, cut, bounds, found, step, nodes, vocab, pieces, rows,
    BY_MASS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Write the last logit that stays, and how many of the tokens that have it do."""
    searched, wanted = _wanted(top_ks, top_ps, row, nodes, vocab, BY_MASS)
    if searched:
        number = tl.program_id(0).to(tl.int64)
        best = tl.load(top + number)
        _, key, above, limit = _narrowed(wanted, best, cut, bounds, found, step, pieces, rows, BY_MASS, PIECES)
        room = limit - above
        if BY_MASS:
            each = _mass(_number(key), best)
            room = (room + each - 1) // each
            room = tl.where(key == tl.load(cut + 2 * number), tl.minimum(room, tl.load(cut + 2 * number + 1)), room)
        tl.store(cut + 2 * number, key)
        tl.store(cut + 2 * number + 1, room)


@triton.jit(do_not_specialize=["pieces"])
@no_type_check
def _count_equal(
    logits, temperatures, nodes, vocab, batch_stride, node_stride, cut, equal, pieces, PIECE: tl.constexpr
):
    """Write how many tokens of a piece have the last logit that stays."""
    number, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index, value = _scaled(logits, temperatures, nodes, vocab, batch_stride, node_stride, piece * PIECE, PIECE)
    same = (_key(value) == tl.load(cut + 2 * number)) & (index < vocab)
    tl.store(equal + number * pieces + piece, tl.sum(same.to(tl.int32)))


@triton.jit(do_not_specialize=["pieces"])
@no_type_check
def _weigh(
    logits, temperatures, nodes, vocab, batch_stride, node_stride, top, row, cut, equal, probs, sums, pieces,
    FILTERED: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Write the weights of a piece's tokens, 0 for those that do not stay, and their sum."""
    number, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index, value = _scaled(logits, temperatures, nodes, vocab, batch_stride, node_stride, piece * PIECE, PIECE)
    drawn = tl.load(row + 2 * number) == 1
    weight = tl.exp(tl.where(drawn, value, 0.0) - tl.where(drawn, tl.load(top + number), 0.0))
    if FILTERED:
        key, keys = tl.load(cut + 2 * number), _key(value)
        other = tl.arange(0, PIECES)
        before = tl.sum(tl.load(equal + number * pieces + other, mask=other < piece, other=0))
        same = (keys == key) & (index < vocab)
        rank = before + tl.cumsum(same.to(tl.int32), 0)
        weight = tl.where((keys > key) | (same & (rank <= tl.load(cut + 2 * number + 1))), weight, 0.0)
    tl.store(probs + number * vocab + index, weight, mask=index < vocab)
    tl.store(sums + number * pieces + piece, tl.sum(weight))


@triton.jit
@no_type_check
def _of_row(sums, pieces, PIECES: tl.constexpr):
    """Return the sum over the pieces of this program's row."""
    piece = tl.arange(0, PIECES)
    return tl.sum(tl.load(sums + tl.program_id(0).to(tl.int64) * pieces + piece, mask=piece < pieces, other=0.0))


@triton.jit(do_not_specialize=["pieces"])
@no_type_check
def _drop(probs, min_ps, sums, rest, nodes, vocab, pieces, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Take out the tokens with less than min-p of the most probable one's weight, and write the sum of the rest."""
    number, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = piece * PIECE + tl.arange(0, PIECE)
    weight = tl.load(probs + number * vocab + index, mask=index < vocab, other=0.0)
    total = _of_row(sums, pieces, PIECES)
    floor = tl.load(min_ps + number // nodes) * tl.div_rn(1.0, total)
    weight = tl.where(tl.div_rn(weight, total) >= floor, weight, 0.0)
    tl.store(probs + number * vocab + index, weight, mask=index < vocab)
    tl.store(rest + number * pieces + piece, tl.sum(weight))


@triton.jit(do_not_specialize=["pieces"])
@no_type_check
def _normalize(probs, sums, row, vocab, pieces, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Divide the weights of a piece by their sum over the row; write one-hot or NaN where that is what the row is."""
    number, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = piece * PIECE + tl.arange(0, PIECE)
    kind, first = tl.load(row + 2 * number), tl.load(row + 2 * number + 1)
    weight = tl.load(probs + number * vocab + index, mask=index < vocab, other=0.0)
    drawn = tl.div_rn(weight, _of_row(sums, pieces, PIECES))
    other = tl.where(kind == 0, (index == first).to(tl.float32), float("nan"))
    tl.store(probs + number * vocab + index, tl.where(kind == 1, drawn, other), mask=index < vocab)
