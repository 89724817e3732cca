"""One launch each for what would be a loop over the depth of trees: how nodes are connected, and where a walk ends."""
# ruff: noqa: N803 (a kernel's constants are written in capitals)

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

_NODES = 16  # of one program of ``_connect``


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
    _connect[(rows, triton.cdiv(width, _NODES))](
        parents,
        tables["depth"],
        tables["deeper"],
        tables["ancestors"],
        tables["ancestor_words"],
        width,
        max_depth,
        parents.stride(0),
        **sizes,
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
        tokens,
        parents,
        valid,
        following,
        path,
        count,
        expected,
        next_token,
        width,
        max_depth,
        tokens.stride(0),
        parents.stride(0),
        valid.stride(0),
        following.stride(0),
        **sizes,
    )
    return path, count, expected, next_token


@triton.jit
@no_type_check
def _connect(
    parents,
    depths,
    deepers,
    ancestors,
    words,
    width,
    max_depth,
    stride,
    WORDS: tl.constexpr,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
):
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
    tokens,
    parents,
    valid,
    following,
    path,
    count,
    expected,
    next_token,
    width,
    max_depth,
    token_stride,
    parent_stride,
    valid_stride,
    following_stride,
    WIDTH: tl.constexpr,
):
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
