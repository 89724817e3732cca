"""Top-k and top-p: which tokens may be drawn. Of equal logits the lower ids come first.

A CPU sorts only the few tokens that may be among them, which the largest logits of blocks of tokens tell. On a GPU
``specdec.kernels.sampling`` finds them in few launches.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.counting import count_operation
from specdec.native import DTYPES, is_plain, native_library
from specdec.opaque import opaque

_BLOCK = 32
"""Tokens of which the largest logit is kept: blocks without one that is large enough are looked at no more."""
_MANY = 256  # blocks of a row: to sort as many tokens takes longer than to find the few where its top p ends
_LEVELS, _STEPS = 1024, 8  # of logits, counted from the largest one down, and how many of them are one nat


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
    if not any_top_p and largest_top_k == 0:
        return logits
    rows, nodes = logits.flatten(0, 1), logits.shape[1]
    given = top_k.repeat_interleave(nodes)[:, None], top_p.repeat_interleave(nodes)[:, None]
    kept = opaque(_keep_top, rows, *given, largest_top_k, any_top_p and not all_top_k)
    return kept.view_as(logits)


def _keep_top(
    rows: Float[Tensor, "row vocab"], k: Int[Tensor, "row 1"], p: Float[Tensor, "row 1"], most: int | None, alone: bool
) -> Float[Tensor, "row vocab"]:
    """Returns rows as ``keep_top`` does; ``most`` is the largest top-k, ``alone``: a row may have top-p alone."""
    vocab = rows.shape[1]
    whole = F.pad(rows, (0, -vocab % _BLOCK), value=-torch.inf) if vocab % _BLOCK else rows
    blocks = whole.unflatten(1, (-1, _BLOCK))
    tops = blocks.amax(-1)
    peak = tops.amax(-1, keepdim=True)
    least, total = torch.full_like(peak, -torch.inf), None
    if most != 0:  # as many blocks have a logit of this size, so that as many tokens have
        first = tops.topk(tops.shape[1] if most is None else min(most, tops.shape[1]), dim=-1).values
        least = first.gather(1, k.clamp(1, first.shape[1]) - 1).where(k <= first.shape[1], least)
    probs = rows.softmax(-1) if alone else rows
    if alone:  # tokens of less than (1 - p) / vocab have less than 1 - p together: the top p ends before them
        total = probs.amax(-1, keepdim=True).reciprocal()
        least = least.where(k > 0, peak + ((1 - p) * total / (2 * vocab)).log())
    # NaN must not disappear here, because it tells that a request has gone wrong.
    passes = ((k == 0) & (p >= 1)) | peak.isnan()
    least = least.masked_fill(passes, torch.inf)
    wanted, sure, above = tops >= least, None, 0.0
    if total is not None and rows.device.type == "cpu" and (wanted.sum(1) > _MANY).any():
        level = ((peak - rows) * _STEPS).nan_to_num_(nan=_LEVELS).clamp_(max=_LEVELS - 1).long()
        index = (level + _LEVELS * torch.arange(len(rows))[:, None]).flatten()
        sums = index.bincount(probs.flatten(), _LEVELS * len(rows)).view(-1, _LEVELS).cumsum(1)
        last, narrow = (sums < p).sum(1, keepdim=True), (k == 0) & ~passes  # the level at which the top p ends
        above = (F.pad(sums, (1, 0)).gather(1, last) * total).where(narrow, 0.0)
        sure = narrow & (level < last)
        blocks, wanted = rows[..., None], torch.where(narrow, level == last, rows >= least)
    values, ids = _few(blocks, wanted)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    dropped = (torch.arange(values.shape[1], device=rows.device) >= k) & (k > 0)
    mass = (values - peak).double().exp().masked_fill(dropped, 0.0)  # as shares of the largest
    within = mass.sum(-1, keepdim=True)
    stays = above + mass.cumsum(-1) - mass < p * (within if total is None else within.where(k > 0, total))
    stays[:, 0] = True  # nothing is before it, and p is positive
    values = values.where((stays | (p >= 1)) & ~dropped, -torch.inf)
    ids = ids.gather(1, order).clamp_(max=vocab - 1)
    kept = torch.full_like(rows, -torch.inf).scatter_reduce_(1, ids, values, "amax")
    kept = kept if sure is None else torch.where(sure, rows, kept)
    return torch.where(passes, rows, kept) if rows.device.type != "cpu" or passes.any() else kept


def _few(
    blocks: Float[Tensor, "row block token"], wanted: Bool[Tensor, "row block"]
) -> tuple[Float[Tensor, "row few"], Int[Tensor, "row few"]]:
    """Returns the logits of every row's wanted blocks, and their ids in order; behind them -inf, with any id.

    On a GPU, which would make the host wait for their number, these are all blocks.
    """
    if blocks.device.type != "cpu":
        values = blocks.flatten(1)
        return values, torch.arange(values.shape[1], device=values.device).expand_as(values)
    row, block = wanted.nonzero(as_tuple=True)
    counts, size = row.bincount(minlength=len(blocks)), blocks.shape[2]
    place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    values = blocks.new_full((len(blocks), max(int(counts.max()), 1), size), -torch.inf)
    ids = torch.zeros_like(values, dtype=torch.long)
    values[row, place] = blocks[row, block]
    ids[row, place] = block[:, None] * size + torch.arange(size)
    return values.flatten(1), ids.flatten(1)


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
