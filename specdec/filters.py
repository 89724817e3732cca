"""Top-k and top-p: which tokens may be drawn. Of equal logits the lower ids come first.

Nothing is sorted. The tokens that stay are those above some logit, and the first few of those that equal it: only that
logit and that number have to be found. With top-k in every row, both are among the k largest, which ``topk`` finds.
Top-p alone is a search for the smallest logit with less than p above it: bisection over the 32 bits of a float; sorting
131,072 logits takes a CPU five times as long. On a GPU ``specdec.kernels.sampling`` does the same in few launches.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.counting import count_operation
from specdec.native import DTYPES, is_plain, native_library
from specdec.opaque import opaque

_BITS = 32


def keep_top(
    logits: Float[Tensor, "batch node vocab"],
    top_k: Int[Tensor, " batch"],
    top_p: Float[Tensor, " batch"],
    *,
    largest_top_k: int | None = None,
    all_top_k: bool = False,
    any_top_p: bool = True,
) -> Float[Tensor, "batch node vocab"]:
    """Returns the logits with -inf outside the top k, and then outside the top p of what is left.

    A token stays within top-p if the tokens before it have less than p together. The first one always stays, and so
    does NaN.

    Args:
        top_k, top_p: 0 and 1 where off.
        largest_top_k: The largest of ``top_k``, 0 if all are off; None if the host does not know it.
        all_top_k: Whether every row that matters has a top-k; what becomes of the others is left open.
    """
    vocab = logits.shape[-1]
    most = vocab if largest_top_k is None else min(largest_top_k, vocab)
    k = top_k[:, None, None]
    if most > 0 and all_top_k:
        largest = logits.topk(most, dim=-1).values
        return _drop_below(logits, *_last_kept(largest, k.where(k > 0, most), top_p[:, None, None]))
    if most > 0:
        largest = logits.topk(most, dim=-1).values
        least, ties = _last_kept(largest, k.where(k > 0, most), None)
        off = k == 0
        logits = _drop_below(logits, least.masked_fill(off, -torch.inf), ties.masked_fill(off, vocab))
    if not any_top_p:
        return logits
    return logits.masked_fill(~nucleus(logits, top_p), -torch.inf)


def largest(
    values: Float[Tensor, "*rows vocab"], count: int
) -> tuple[Float[Tensor, "*rows rank"], Int[Tensor, "*rows rank"]]:
    """Returns the largest values, descending, and their ids; unlike ``topk``, of equal values the lower ids first."""
    vocab = values.shape[-1]
    least = values.topk(count, dim=-1).values[..., -1:]
    equal = values == least
    room = count - (values > least).sum(-1, keepdim=True)
    chosen = (values > least) | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))
    backwards = torch.arange(vocab, 0, -1, device=values.device, dtype=torch.int32)
    ids = (vocab - (backwards * chosen).topk(count, dim=-1).values).clamp_(max=vocab - 1).long()  # ascending
    ordered, place = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(-1, place)


def first_largest(values: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows"]:
    """Returns the id of every row's largest value, the lowest of equal ones; in a row with NaN, the first NaN's.

    A CPU's ``argmax`` compares one value after the other; this project's C takes a vector at a time.
    """
    if values.device.type == "cpu" and values.dtype in DTYPES and is_plain(values) and native_library() is not None:
        return opaque(_first_largest, values)
    return values.argmax(-1)


def _first_largest(values: Tensor) -> Tensor:
    library = native_library()
    assert library is not None, "asked before"
    values = values.contiguous()
    ids = values.new_empty(values.shape[:-1], dtype=torch.long)
    library.first_largest(values.data_ptr(), ids.data_ptr(), ids.numel(), values.shape[-1], DTYPES[values.dtype])
    count_operation("largest")
    return ids


def nucleus(
    logits: Float[Tensor, "batch node vocab"], top_p: Float[Tensor, " batch"]
) -> Bool[Tensor, "batch node vocab"]:
    """Returns which tokens are within the top p; bisection over the bits of a logit, without sorting. NaN stays."""
    mass = logits.softmax(-1)
    key = _ordered_bits(logits)
    limit = torch.where(top_p < 1, top_p, torch.inf)[:, None, None]
    # Above ``enough`` there is less than p, above ``too_low`` there is not.
    enough = _ordered_bits(logits.amax(-1, keepdim=True)).long()
    too_low = torch.full_like(enough, -(2 ** (_BITS - 1)))  # no number has these bits
    is_above = torch.empty_like(mass)  # a number, not a bool: to convert it takes longer than all else
    for _ in range(_BITS):
        middle = (enough + too_low) >> 1
        torch.gt(key, middle.int(), out=is_above)
        fits = is_above.mul_(mass).sum(-1, keepdim=True) < limit
        enough, too_low = torch.where(fits, middle, enough), torch.where(fits, too_low, middle)
    least = enough.int()
    above = (mass * (key > least)).sum(-1, keepdim=True)
    equal = key == least
    # Equal logits have equal mass, and stand in the order of their ids.
    before = torch.addcmul(above, (equal.cumsum(-1, dtype=torch.int32) - 1), (mass * equal).amax(-1, keepdim=True))
    return (key >= least) & ~(equal & (before >= limit))


def _ordered_bits(values: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows vocab"]:
    """Returns integers that are ordered as the numbers are; both zeros are equal."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> (_BITS - 1)) & 0x7FFFFFFF)


def _last_kept(
    largest: Float[Tensor, "batch node rank"], k: Int[Tensor, "batch 1 1"], top_p: Float[Tensor, "batch 1 1"] | None
) -> tuple[Float[Tensor, "batch node 1"], Int[Tensor, "batch node 1"]]:
    """Returns the smallest logit that stays, and how many of those that equal it stay; ``largest`` are descending."""
    rank = torch.arange(largest.shape[-1], device=largest.device)
    dropped = rank >= k
    if top_p is not None:
        mass = largest.masked_fill(dropped, -torch.inf).softmax(-1)
        before = mass.cumsum(-1) - mass
        # The first token always stays: nothing is before it, and top_p is positive.
        dropped = dropped | ((before >= top_p) & (rank > 0) & (top_p < 1))
    kept = (~dropped).sum(-1, keepdim=True).expand(*largest.shape[:-1], 1)
    least = largest.gather(-1, kept - 1)
    return least, kept - (largest > least).sum(-1, keepdim=True)


def _drop_below(
    logits: Float[Tensor, "batch node vocab"], least: Float[Tensor, "batch node 1"], ties: Int[Tensor, "batch node 1"]
) -> Float[Tensor, "batch node vocab"]:
    """Returns the logits with -inf below the least one that stays, and at all that equal it but the first few.

    NaN is not below anything: it must not disappear here, because it tells that a request has gone wrong.
    """
    number = (logits == least).cumsum(-1, dtype=torch.int32)
    return logits.masked_fill((logits < least) | ((logits == least) & (number > ties)), -torch.inf)
