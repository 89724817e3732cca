"""Tree attention: a program per row, key head, block of queries and piece of the context.

A row's keys are a prefix, which every query sees, and the cells of a tree behind it, of which a query sees its
ancestors. The queries of a key head are its query heads times the row's nodes, so that a key is read from memory once
for all of them. A long context is cut into pieces (flash decoding), which different programs read at the same time;
``merge_pieces`` then joins their softmaxes. Scores are kept in base 2, for which GPUs have an instruction.

The functions are source code to Triton: ``no_type_check`` keeps wrappers that check types away from them.
"""
# ruff: noqa: N803, N806 (a kernel's constants are written in capitals)

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.runtime import JITFunction

from specdec.kernels import Stored
from specdec.kernels.tiles import Tiles, choose_pieces, choose_tiles, processors

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, eq=False)
class Seen:
    """What the queries of a forward see: the prefix of their row, and their ancestors in the tree behind it.

    Attributes:
        lengths: Positions of every row's prefix.
        table: The pages of every row, in order: indices into ``Stored``'s tensors.
        words: For every query 64 cells of the tree per number, the first cell in the lowest bit; one row, if it holds
            for all rows. None if every query sees all cells up to its own.
        depth: The depth of every cell; one row, if it holds for all rows.
        keys: A bound: no row has more positions, the tree's included.
    """

    lengths: Int[Tensor, " batch"]
    table: Int[Tensor, "batch page"]
    words: Int[Tensor, "rows query word"] | None
    depth: Int[Tensor, "rows cell"]
    keys: int


def tree_attention(
    query: Float[Tensor, "batch head query head_dim"],
    stored: Stored,
    seen: Seen,
    *,
    window: int | None = None,
    chunk: int | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " head"] | None = None,
    pieces: int | None = None,
    tiles: Tiles | None = None,
) -> Float[Tensor, "batch query head value_dim"]:
    """Return the attention of a tree's nodes over the cache, which holds their own keys and values already.

    Nothing here looks at a value on the device, so that a launch can be captured in a graph.

    Args:
        query: The *last* nodes of the tree.
        stored: A layer's keys and values. Quantized ones are multiplied with their scales on the way.
        seen: Where the rows are, and what their queries see.
        window, chunk: The layer's reach, counted in positions of the sequence (``length + depth``).
        scaling, softcap, sinks: See ``AttentionCall``.
        pieces: Into how many equal pieces a row's context is cut; None for as many as fill the device.
        tiles: How the launch is divided; None for what suits the sizes.
    """
    rows, heads, nodes, head_dim = query.shape
    kv_heads, page_size, value_dim = stored.values.shape[1:]
    groups = heads // kv_heads
    if query.stride(3) != 1:
        query = query.contiguous()
    tiles = tiles or choose_tiles(nodes * groups, head_dim, value_dim, query.dtype, query.device)
    blocks = triton.cdiv(nodes * groups, tiles.queries)
    positions = seen.table.shape[1] * page_size
    keys = min(seen.keys, positions)
    if pieces is None:
        pieces = choose_pieces(blocks * rows * kv_heads, keys, processors(query.device))
    output = query.new_empty(rows, nodes, heads, value_dim)
    nothing = seen.lengths  # stands for a tensor that this launch does not read
    split = pieces > 1
    totals = query.new_empty(rows, nodes, heads, pieces, value_dim, dtype=torch.float32) if split else nothing
    logs = query.new_empty(rows, nodes, heads, pieces, dtype=torch.float32) if split else nothing
    scaled = stored.key_scales is not None and stored.value_scales is not None
    scales = (stored.key_scales, stored.value_scales) if scaled else (nothing, nothing)
    scale_strides = [stride for t in scales if t is not None for stride in t.stride()[:3]] if scaled else [0] * 6
    word_strides = (0, 0) if seen.words is None else (_row_stride(seen.words), seen.words.stride(1))
    low = max(16, triton.next_power_of_2(head_dim + 1) // 2)  # the largest power of two that is not above head_dim
    rest = head_dim - low
    dtype = DTYPES[query.dtype]
    # The interpreter multiplies the bit patterns of bfloat16 (triton#11584).
    compute = tl.float32 if INTERPRETED and query.dtype is torch.bfloat16 else dtype
    block_v = max(16, triton.next_power_of_2(value_dim))
    with torch.cuda.device_of(query):  # Triton launches on the current device
        kernel: Any = attend_piece
        kernel[(blocks, rows * kv_heads, pieces)](
            query, stored.keys, stored.values, *scales, nothing if sinks is None else sinks, output, totals, logs,
            seen.lengths, seen.table, nothing if seen.words is None else seen.words, seen.depth,
            head_dim**-0.5 if scaling is None else scaling, 1.0 if softcap is None else softcap, nodes,
            seen.depth.shape[1], positions, pieces, page_size, *query.stride()[:3], *stored.keys.stride()[:3],
            *stored.values.stride()[:3], *scale_strides, seen.table.stride(0), *word_strides, _row_stride(seen.depth),
            HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=tiles.queries,
            BLOCK_N=tiles.keys, BLOCK_D=low, BLOCK_REST=0 if rest <= 0 else max(16, triton.next_power_of_2(rest)),
            BLOCK_V=block_v, IN_PIECES=split, IN_LINE=seen.words is None, PAGED=seen.table.shape[1] > 1, SCALED=scaled,
            SOFTCAP=softcap is not None, SINKS=sinks is not None, WINDOW=window or 0, CHUNK=chunk or 0,
            COMPUTE=compute, ROUND=dtype, num_warps=tiles.warps, num_stages=tiles.stages,
            enable_fp_fusion=True,  # Triton's present default, which it announces to change
        )  # fmt: skip
        if split:
            kernel = merge_pieces
            kernel[(rows * nodes, heads)](
                totals, logs, nothing if sinks is None else sinks, output, pieces, HEADS=heads, VALUE_DIM=value_dim,
                BLOCK_V=block_v, BLOCK_S=triton.next_power_of_2(pieces), STEP=min(16, triton.next_power_of_2(pieces)),
                SINKS=sinks is not None, ROUND=dtype, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
    return output


def _row_stride(tensor: Tensor) -> int:
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
@no_type_check
def _hidden(position, in_tree, cell, length, depth, query_position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return which queries a layer's window or chunk keeps from which keys, by their positions in the sequence."""
    of_cell = length + tl.load(depth + cell, mask=in_tree, other=0)
    key_position = tl.where(in_tree, of_cell, position)
    hidden = query_position[:, None] < 0
    if WINDOW > 0:
        hidden |= query_position[:, None] - key_position[None, :] >= WINDOW
    if CHUNK > 0:
        hidden |= query_position[:, None] // CHUNK != key_position[None, :] // CHUNK
    return hidden


@triton.jit
@no_type_check
def _add_block(
    total, norm, best, start, stop, length, width, query, query_rest, cell_of_query, query_position, keys, values,
    key_scales, value_scales, table, words, depth, scale, softcap, page_size, key_page_stride, key_stride,
    value_page_stride, value_stride, key_scale_page_stride, key_scale_stride, value_scale_page_stride,
    value_scale_stride, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, IN_PREFIX: tl.constexpr,
    IN_LINE: tl.constexpr, PAGED: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, COMPUTE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Adds the keys of one block of positions to the running softmax of a block of queries.

    ``IN_PREFIX`` says that all positions of the block exist and belong to the prefix.
    """
    position = start + tl.arange(0, BLOCK_N)
    exists = position < stop
    cell = position - length
    in_tree = (cell >= 0) & exists

    if PAGED:
        page = tl.load(table + position // page_size, mask=exists, other=0).to(tl.int64)
        place = (position % page_size).to(tl.int64)
    else:  # the caller has added the only page to the pointers
        page = tl.zeros([BLOCK_N], dtype=tl.int64)
        place = position.to(tl.int64)
    key_at = keys + page * key_page_stride + place * key_stride
    value_at = values + page * value_page_stride + place * value_stride

    d = tl.arange(0, BLOCK_D)
    if IN_PREFIX and BLOCK_D <= HEAD_DIM:
        key = tl.load(key_at[None, :] + d[:, None])
    else:
        key = tl.load(key_at[None, :] + d[:, None], mask=exists[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
    scores = tl.dot(query, key.to(COMPUTE), input_precision="ieee")
    if BLOCK_REST > 0:
        r = BLOCK_D + tl.arange(0, BLOCK_REST)
        key_rest = tl.load(key_at[None, :] + r[:, None], mask=exists[None, :] & (r < HEAD_DIM)[:, None], other=0.0)
        scores += tl.dot(query_rest, key_rest.to(COMPUTE), input_precision="ieee")
    scores *= scale
    if SCALED:
        key_factor = key_scales + page * key_scale_page_stride + place * key_scale_stride
        scores *= tl.load(key_factor, mask=exists, other=0.0)[None, :]
    if SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E) / softcap) + 1.0))
    scores *= LOG2_E

    if not IN_PREFIX:
        if IN_LINE:
            sees = cell[None, :] <= cell_of_query[:, None]
        else:
            # A block's cells lie in a few words. Each query loads those, not one for every cell.
            first_word = tl.maximum(start - length, 0) // 64
            sees = (cell < 0)[None, :] & (query_position >= 0)[:, None]
            for i in tl.static_range((BLOCK_N + 126) // 64):
                at = tl.zeros_like(query_position) + first_word + i
                word = tl.load(words + at, mask=(query_position >= 0) & (at * 64 < width), other=0)
                bit = (word[:, None] >> (cell & 63)[None, :].to(tl.int64)) & 1
                sees |= (bit == 1) & ((cell >> 6) == first_word + i)[None, :]
        scores = tl.where(sees & exists[None, :], scores, NOTHING)
    if WINDOW > 0 or CHUNK > 0:
        hidden = _hidden(position, in_tree, cell, length, depth, query_position, WINDOW, CHUNK)
        scores = tl.where(hidden, NOTHING, scores)

    new_best = tl.maximum(best, tl.max(scores, 1))
    # While a query has seen nothing, its best score is -inf, of which no difference may be taken.
    base = tl.where(new_best == NOTHING, 0.0, new_best)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(best - base)
    norm = norm * fade + tl.sum(weights, 1)
    if SCALED:
        value_factor = value_scales + page * value_scale_page_stride + place * value_scale_stride
        weights *= tl.load(value_factor, mask=exists, other=0.0)[None, :]
    v = tl.arange(0, BLOCK_V)
    if IN_PREFIX and BLOCK_V == VALUE_DIM:
        value = tl.load(value_at[:, None] + v[None, :])
    else:
        value = tl.load(value_at[:, None] + v[None, :], mask=exists[:, None] & (v < VALUE_DIM)[None, :], other=0.0)
    weights = weights.to(ROUND).to(COMPUTE)
    total = total * fade[:, None] + tl.dot(weights, value.to(COMPUTE), input_precision="ieee")
    return total, norm, new_best


@triton.jit(do_not_specialize=["nodes", "width", "positions", "pieces"])
@no_type_check
def attend_piece(
    queries, keys, values, key_scales, value_scales, sinks, output, piece_totals, piece_logs, lengths, table, words,
    depth, scale, softcap, nodes, width, positions, pieces, page_size, query_row_stride, query_head_stride,
    query_stride, key_page_stride, key_head_stride, key_stride, value_page_stride, value_head_stride, value_stride,
    key_scale_page_stride, key_scale_head_stride, key_scale_stride, value_scale_page_stride, value_scale_head_stride,
    value_scale_stride, table_stride, words_row_stride, words_stride, depth_stride, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr,
    IN_PIECES: tl.constexpr, IN_LINE: tl.constexpr, PAGED: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, COMPUTE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Attends from one block of a row's queries to one piece of its context.

    The grid is (blocks of queries, rows * key heads, pieces). With a single piece, the output is written; with more,
    each writes its normalized output and the logarithm of its norm, for ``merge_pieces``.
    """
    GROUPS: tl.constexpr = HEADS // KV_HEADS
    row, kv_head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    length = tl.load(lengths + row).to(tl.int32)

    # A block's queries: node by node, the heads of the group side by side.
    item = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    node, head = item // GROUPS, kv_head * GROUPS + item % GROUPS
    real = node < nodes
    cell_of_query = width - nodes + node
    depth += row * depth_stride
    words += row * words_row_stride + node * words_stride
    query_position = tl.where(real, length + tl.load(depth + cell_of_query, mask=real, other=0).to(tl.int32), -1)

    at = queries + row.to(tl.int64) * query_row_stride + head * query_head_stride + node * query_stride
    d = tl.arange(0, BLOCK_D)
    query = tl.load(at[:, None] + d[None, :], mask=real[:, None] & (d < HEAD_DIM)[None, :], other=0.0).to(COMPUTE)
    query_rest = query
    if BLOCK_REST > 0:
        r = BLOCK_D + tl.arange(0, BLOCK_REST)
        query_rest = tl.load(at[:, None] + r[None, :], mask=real[:, None] & (r < HEAD_DIM)[None, :], other=0.0)
        query_rest = query_rest.to(COMPUTE)

    # What any query of the block may see. Invalid nodes may stand past the row's last position.
    stop = tl.minimum(length + width, positions)
    if IN_LINE:
        last = tl.minimum((tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // GROUPS, nodes - 1)
        stop = tl.minimum(stop, length + width - nodes + last + 1)
    first = 0
    if WINDOW > 0:  # the root's window reaches back furthest
        first = tl.maximum(length - WINDOW + 1, 0)
    if CHUNK > 0:
        first = length // CHUNK * CHUNK
    first = first // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(stop - first, pieces), BLOCK_N) * BLOCK_N
    begin = first + tl.program_id(2) * share
    end = tl.minimum(stop, begin + share)
    unmasked = begin + tl.maximum(tl.minimum(end, length) - begin, 0) // BLOCK_N * BLOCK_N

    if PAGED:
        table += row * table_stride
    else:
        page = tl.load(table + row * table_stride).to(tl.int64)
        keys += page * key_page_stride
        values += page * value_page_stride
        if SCALED:
            key_scales += page * key_scale_page_stride
            value_scales += page * value_scale_page_stride
    keys += kv_head.to(tl.int64) * key_head_stride
    values += kv_head.to(tl.int64) * value_head_stride
    if SCALED:
        key_scales += kv_head.to(tl.int64) * key_scale_head_stride
        value_scales += kv_head.to(tl.int64) * value_scale_head_stride

    total = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    norm = tl.zeros([BLOCK_M], dtype=tl.float32)
    best = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
    for start in range(begin, unmasked, BLOCK_N):
        total, norm, best = _add_block(
            total, norm, best, start, end, length, width, query, query_rest, cell_of_query, query_position,
            keys, values, key_scales, value_scales, table, words, depth, scale, softcap,
            page_size, key_page_stride, key_stride, value_page_stride, value_stride,
            key_scale_page_stride, key_scale_stride, value_scale_page_stride, value_scale_stride,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_REST, BLOCK_V, BLOCK_N, True, IN_LINE, PAGED, SCALED, SOFTCAP,
            WINDOW, CHUNK, COMPUTE, ROUND,
        )  # fmt: skip
    # A few steps at most, each with many loads: none of them in advance, which would take shared memory and registers.
    for start in tl.range(unmasked, end, BLOCK_N, num_stages=1):
        total, norm, best = _add_block(
            total, norm, best, start, end, length, width, query, query_rest, cell_of_query, query_position,
            keys, values, key_scales, value_scales, table, words, depth, scale, softcap,
            page_size, key_page_stride, key_stride, value_page_stride, value_stride,
            key_scale_page_stride, key_scale_stride, value_scale_page_stride, value_scale_stride,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_REST, BLOCK_V, BLOCK_N, False, IN_LINE, PAGED, SCALED, SOFTCAP,
            WINDOW, CHUNK, COMPUTE, ROUND,
        )  # fmt: skip

    v = tl.arange(0, BLOCK_V)
    kept = real[:, None] & (v < VALUE_DIM)[None, :]
    line = (row * nodes + node).to(tl.int64) * HEADS + head
    if IN_PIECES:
        seen = norm > 0.0
        log = tl.where(seen, best + tl.log2(tl.where(seen, norm, 1.0)), NOTHING)
        tl.store(piece_logs + line * pieces + tl.program_id(2), log, mask=real)
        # A piece without keys writes nothing more, and is not read.
        at = (line * pieces + tl.program_id(2))[:, None] * VALUE_DIM + v[None, :]
        tl.store(piece_totals + at, total / tl.where(seen, norm, 1.0)[:, None], mask=kept & seen[:, None])
    else:
        if SINKS:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
            new_best = tl.maximum(best, sink)
            fade = tl.exp2(best - new_best)
            norm = norm * fade + tl.exp2(sink - new_best)
            total *= fade[:, None]
        total /= tl.where(norm > 0.0, norm, 1.0)[:, None]
        tl.store(output + line[:, None] * VALUE_DIM + v[None, :], total.to(ROUND), mask=kept)


@triton.jit(do_not_specialize=["pieces"])
@no_type_check
def merge_pieces(
    piece_totals, piece_logs, sinks, output, pieces, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr, STEP: tl.constexpr, SINKS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Joins the pieces of one query head of one node, weighted by their norms. The grid is (rows * nodes, heads)."""
    line = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    piece = tl.arange(0, BLOCK_S)
    best = tl.max(tl.load(piece_logs + line * pieces + piece, mask=piece < pieces, other=NOTHING), 0)
    norm = 0.0
    if SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32) * LOG2_E
        best = tl.maximum(best, sink)
    best = tl.where(best == NOTHING, 0.0, best)
    if SINKS:
        norm += tl.exp2(sink - best)
    v = tl.arange(0, BLOCK_V)
    total = tl.zeros([BLOCK_V], dtype=tl.float32)
    for start in range(0, pieces, STEP):
        some = start + tl.arange(0, STEP)
        log = tl.load(piece_logs + line * pieces + some, mask=some < pieces, other=NOTHING)
        weight = tl.exp2(log - best)
        at = (line * pieces + some)[:, None] * VALUE_DIM + v[None, :]
        part = tl.load(piece_totals + at, mask=(log > NOTHING)[:, None] & (v < VALUE_DIM)[None, :], other=0.0)
        total += tl.sum(part * weight[:, None], 0)
        norm += tl.sum(weight, 0)
    total /= tl.where(norm > 0.0, norm, 1.0)
    tl.store(output + line * VALUE_DIM + v, total.to(ROUND), mask=v < VALUE_DIM)


INTERPRETED = not isinstance(attend_piece, JITFunction)
"""Whether Triton runs kernels on the CPU, operation by operation, as it was told when it was imported."""
