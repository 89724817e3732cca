"""One launch each for what would be many: how nodes are connected, where a walk ends, which nodes are best."""
# ruff: noqa: N803 (a kernel's constants are written in capitals)

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

_NODES = 16  # of one program of ``_connect``
_OFFERS = tl.constexpr(16)  # with which ``_front`` compares at a time


def connected(parents: Int[Tensor, "rows node"], max_depth: int) -> dict[str, Tensor]:
    """Returns ``depth``, ``deeper``, ``ancestors`` and ``ancestor_words`` of a ``Topology`` by their names."""
    rows, width = parents.shape
    words = triton.cdiv(width, 64)
    tables = {
        "depth": torch.empty_like(parents),
        "deeper": torch.empty_like(parents, dtype=torch.bool),
        "ancestors": parents.new_empty(rows, width, width, dtype=torch.bool),
        "ancestor_words": parents.new_empty(rows, width, words),
    }
    sizes: dict[str, Any] = {"WORDS": words, "NODES": _NODES, "WIDTH": triton.next_power_of_2(width)}
    depth, deeper, ancestors, bits = tables.values()
    _connect[(rows, triton.cdiv(width, _NODES))](
        parents, depth, deeper, ancestors, bits, width, max_depth, parents.stride(0), **sizes
    )
    return tables


def walk(
    tokens: Int[Tensor, "batch node"],
    parents: Int[Tensor, "batch node"],
    valid: Bool[Tensor, "batch node"],
    following: Int[Tensor, "batch node"],
    max_depth: int,
) -> tuple[Int[Tensor, "batch depth"], Int[Tensor, " batch"], Float[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Returns path, length, the same in float32, and next token of the walk along certain tokens (``acceptance``)."""
    batch, width = tokens.shape
    path = tokens.new_empty(batch, max_depth)
    count, next_token = tokens.new_empty(2, batch)
    expected = torch.empty(batch, device=tokens.device)
    sizes: dict[str, Any] = {"WIDTH": triton.next_power_of_2(width)}
    _walk[(batch,)](
        tokens, parents, valid, following, path, count, expected, next_token, width, max_depth,
        tokens.stride(0), parents.stride(0), valid.stride(0), following.stride(0), **sizes,
    )  # fmt: skip
    return path, count, expected, next_token


def front(
    worth: Float[Tensor, "batch some"],
    log_probs: Float[Tensor, "batch scored child"],
    token: Int[Tensor, "batch scored child"],
    width: int,
    first: int,
    offered: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the children of a level and the best of them (``drafting.builders.expansion``)."""
    batch, nodes = worth.shape
    children = token.shape[2]
    log_probs, token = (each.expand(-1, nodes, -1) for each in (log_probs, token))
    width = min(width, nodes * children)
    score, best = worth.new_empty(batch, nodes * children), worth.new_empty(batch, width)
    tokens, numbers, above = token.new_empty(3, batch, width)
    block = triton.next_power_of_2(nodes * children)
    sizes: dict[str, Any] = {"OFFERS": block, "num_warps": min(max(block // 64, 4), 16)}
    _front[(batch,)](
        worth, log_probs, token, score, best, tokens, numbers, above, nodes, children, width, first, offered,
        worth.stride(0), *log_probs.stride()[:2], *token.stride()[:2], **sizes,
    )  # fmt: skip
    return score, best, tokens, numbers, above


@triton.jit
@no_type_check
def _offers(index, row, worth, log_probs, nodes, children, worth_stride, row_stride, node_stride):
    """Return the scores of some children of a level."""
    node = index // children
    inside = node < nodes
    own = tl.load(log_probs + row * row_stride + node * node_stride + index % children, mask=inside, other=0.0)
    return tl.load(worth + row * worth_stride + node, mask=inside, other=-float("inf")) + own.to(tl.float64)


@triton.jit
@no_type_check
def _front(
    worth, log_probs, token, score, best, tokens, numbers, above, nodes, children, width, first, offered,
    worth_stride, row_stride, node_stride, token_row_stride, token_node_stride, OFFERS: tl.constexpr,
):  # fmt: skip
    """Score one row's children, and put each of the best where its rank is; of equals, the first ones come first."""
    row = tl.program_id(0).to(tl.int64)
    offers = nodes * children
    index = tl.arange(0, OFFERS)
    mine = _offers(index, row, worth, log_probs, nodes, children, worth_stride, row_stride, node_stride)
    tl.store(score + row * offers + index, mine, mask=index < offers)
    mine = tl.where(mine != mine, -float("inf"), mine)
    rank = tl.zeros([OFFERS], tl.int32)
    for start in range(0, offers, _OFFERS):
        other = start + tl.arange(0, _OFFERS)
        theirs = _offers(other, row, worth, log_probs, nodes, children, worth_stride, row_stride, node_stride)
        theirs = tl.where(theirs != theirs, -float("inf"), theirs)
        before = (theirs[None, :] == mine[:, None]) & (other[None, :] < index[:, None])
        ahead = ((theirs[None, :] > mine[:, None]) | before) & (other < offers)[None, :]
        rank += tl.sum(ahead.to(tl.int32), 1)
    node = index // children
    chosen = (rank < width) & (index < offers)
    place = row * width + rank
    drafted = tl.load(
        token + row * token_row_stride + node * token_node_stride + index % children, mask=chosen, other=0
    )
    tl.store(best + place, mine, mask=chosen)
    tl.store(tokens + place, drafted, mask=chosen)
    tl.store(numbers + place, (index + (1 + offered)).to(tl.int64), mask=chosen)
    tl.store(above + place, (node + first).to(tl.int64), mask=chosen)


@triton.jit
@no_type_check
def _connect(
    parents, depths, deepers, ancestors, words, width, max_depth, stride,
    WORDS: tl.constexpr, NODES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Let some nodes of a row go up to the root, all together."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * NODES + tl.arange(0, NODES)
    cell = tl.arange(0, WIDTH)
    inside = node < width
    marks = node[:, None] == cell[None, :]
    depth = tl.zeros([NODES], tl.int64)
    above = tl.load(parents + row * stride + node, mask=inside, other=-1)
    for _ in range(max_depth):
        there = above >= 0
        depth += there.to(tl.int64)
        marks |= above[:, None] == cell[None, :]
        above = tl.load(parents + row * stride + above, mask=there, other=-1)
    here = row * width + node
    tl.store(depths + here, depth, mask=inside)
    tl.store(deepers + here, above >= 0, mask=inside)
    tl.store(ancestors + here[:, None] * width + cell[None, :], marks, mask=inside[:, None] & (cell[None, :] < width))
    for word in tl.static_range(WORDS):
        bit = tl.where(cell // 64 == word, tl.full([WIDTH], 1, tl.int64) << (cell % 64).to(tl.int64), 0)
        tl.store(words + here * WORDS + word, tl.sum(tl.where(marks, bit[None, :], 0), 1), mask=inside)


@triton.jit
@no_type_check
def _walk(
    tokens, parents, valid, following, path, count, expected, next_token, width, max_depth,
    token_stride, parent_stride, valid_stride, following_stride, WIDTH: tl.constexpr,
):  # fmt: skip
    """Go down in one row: to the first child that has the token which follows."""
    row = tl.program_id(0).to(tl.int64)
    cell = tl.arange(0, WIDTH)
    inside = cell < width
    token = tl.load(tokens + row * token_stride + cell, mask=inside, other=-1)
    parent = tl.load(parents + row * parent_stride + cell, mask=inside, other=-1)
    exists = tl.load(valid + row * valid_stride + cell, mask=inside, other=0) != 0
    node = tl.full([], 0, tl.int64)
    steps = tl.full([], 0, tl.int64)
    wanted = tl.load(following + row * following_stride)
    for depth in range(max_depth):
        # After a mismatch the same node is asked again, and finds nothing again.
        child = tl.min(tl.where(exists & (parent == node) & (token == wanted), cell, WIDTH)).to(tl.int64)
        found = child < WIDTH
        tl.store(path + row * max_depth + depth, tl.where(found, child, -1))
        node = tl.where(found, child, node)
        steps += found.to(tl.int64)
        wanted = tl.load(following + row * following_stride + node)
    tl.store(count + row, steps)
    tl.store(expected + row, steps.to(tl.float32))
    tl.store(next_token + row, wanted)
