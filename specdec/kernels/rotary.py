"""Rotary embedding of queries and keys, their norms before it, and the write of keys and values behind it."""
# ruff: noqa: N803 (a kernel's constants are written in capitals)

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from specdec.kernels import Destination
from specdec.kernels.rounding import rounded

_HEADS = 4  # heads of a program


HeadNorm = tuple[Tensor | None, float, bool, float]
"""The norm of every head before it is turned: weight, eps, rounds and offset, as in ``norm.norm``."""


def rotate(
    query: Float[Tensor, "batch head node head_dim"],
    key: Float[Tensor, "batch kv_head node head_dim"],
    value: Float[Tensor, "batch kv_head node value_dim"],
    cosines: Float[Tensor, "rows 1 node head_dim"],
    sines: Float[Tensor, "rows 1 node head_dim"],
    query_norm: HeadNorm | None,
    key_norm: HeadNorm | None,
    destination: Destination | None,
) -> tuple[Tensor, Tensor]:
    """Return queries and keys, normalized and turned: a head (a, b) becomes ``(a cos - b sin, b cos + a sin)``.

    Every product is rounded to the dtype before the sum.

    Args:
        query, key: Heads of an even size.
        value: Only read to be written.
        cosines, sines: Those of every node's position.
        query_norm, key_norm: What comes before; None for nothing. They differ in their weights only.
        destination: Where keys and values are written (``Destination``); None leaves that to the caller.
    """
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    batch, heads, nodes, dim = query.shape
    kv_heads, value_dim = value.shape[1], value.shape[3]
    new_query, new_key = torch.empty_like(query), torch.empty_like(key)
    weight, eps, rounds, offset = query_norm or (None, 0.0, False, 0.0)
    writes = destination is not None
    keys, values, rows, cells = destination if destination is not None else (key, value, query, query)
    weights = [query if each is None or each[0] is None else each[0] for each in (query_norm, key_norm)]
    blocks = triton.cdiv(heads, _HEADS), triton.cdiv(kv_heads, _HEADS)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        kernel: Any = rotate_heads
        kernel[(batch * nodes, sum(blocks) + (blocks[1] if writes else 0))](
            query, key, value, cosines, sines, *weights, new_query, new_key, keys, values, rows, cells, eps, nodes,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *_position_strides(cosines),
            *_position_strides(sines), *new_query.stride()[:3], *new_key.stride()[:3], *keys.stride()[:3],
            *values.stride()[:3], *(_index_strides(rows) + _index_strides(cells) if writes else (0, 0, 0, 0)),
            HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, VALUE_DIM=value_dim,
            HALF_BLOCK=triton.next_power_of_2(dim // 2), VALUE_BLOCK=triton.next_power_of_2(value_dim), BLOCK=_HEADS,
            NORM=query_norm is not None, WEIGHT=weight is not None, ROUND=rounds, OFFSET=offset, WRITE=writes,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return new_query, new_key


def _position_strides(tensor: Tensor) -> tuple[int, int]:
    """Return the strides of row and node; 0 for an axis that holds for all."""
    return _index_strides(tensor[:, 0])


def _index_strides(tensor: Tensor) -> tuple[int, int]:
    rows, nodes = tensor.shape[:2]
    return (0 if rows == 1 else tensor.stride(0)), (0 if nodes == 1 else tensor.stride(1))


@triton.jit
@no_type_check
def _turn(
    source, source_head, target, target_head, kept, kept_head, first, cosines, sines, weight, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    WEIGHT: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Normalizes and turns some heads of one node."""
    dtype: tl.constexpr = source.dtype.element_ty
    column = tl.arange(0, HALF_BLOCK)
    real = column < HALF
    head = (first + tl.arange(0, BLOCK))[:, None]
    there = (head < HEADS) & real[None, :]
    place = source + head * source_head + column[None, :]
    low = tl.load(place, mask=there, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=there, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
        factor = tl.rsqrt(mean + eps)[:, None]
        low, high = low * factor, high * factor
        if ROUND:
            low, high = rounded(low, dtype), rounded(high, dtype)
        if WEIGHT:
            low *= (tl.load(weight + column, mask=real, other=0.0).to(tl.float32) + OFFSET)[None, :]
            high *= (tl.load(weight + HALF + column, mask=real, other=0.0).to(tl.float32) + OFFSET)[None, :]
        low, high = rounded(low, dtype), rounded(high, dtype)
    low_cos = tl.load(cosines + column, mask=real, other=0.0).to(tl.float32)[None, :]
    high_cos = tl.load(cosines + HALF + column, mask=real, other=0.0).to(tl.float32)[None, :]
    low_sin = tl.load(sines + column, mask=real, other=0.0).to(tl.float32)[None, :]
    high_sin = tl.load(sines + HALF + column, mask=real, other=0.0).to(tl.float32)[None, :]
    new_low = rounded(rounded(low * low_cos, dtype) + rounded(-high * low_sin, dtype), dtype).to(dtype)
    new_high = rounded(rounded(high * high_cos, dtype) + rounded(low * high_sin, dtype), dtype).to(dtype)
    to = target + head * target_head + column[None, :]
    tl.store(to, new_low, mask=there)
    tl.store(to + HALF, new_high, mask=there)
    if WRITE:
        stored = kept + head * kept_head + column[None, :]
        tl.store(stored, new_low, mask=there)
        tl.store(stored + HALF, new_high, mask=there)


@triton.jit(do_not_specialize=["nodes"])
@no_type_check
def rotate_heads(
    query, key, value, cosines, sines, query_weight, key_weight, new_query, new_key, keys, values, rows, cells, eps,
    nodes, query_row, query_head, query_node, key_row, key_head, key_node, value_row, value_head, value_node,
    cosine_row, cosine_node, sine_row, sine_node, new_query_row, new_query_head, new_query_node, new_key_row,
    new_key_head, new_key_node, keys_slot, keys_position, keys_head, values_slot, values_position, values_head,
    rows_row, rows_node, cells_row, cells_node, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    VALUE_DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, WEIGHT: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Computes some heads of one node: of its queries, of its keys, or of its values, which are only written."""
    token = tl.program_id(0)
    row, node = (token // nodes).to(tl.int64), token % nodes
    block = tl.program_id(1)
    query_blocks: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    key_blocks: tl.constexpr = (KV_HEADS + BLOCK - 1) // BLOCK
    cosines += row * cosine_row + node * cosine_node
    sines += row * sine_row + node * sine_node
    if WRITE:
        slot = tl.load(rows + row * rows_row + node * rows_node)
        cell = tl.load(cells + row * cells_row + node * cells_node)
        keys += slot * keys_slot + cell * keys_position
        values += slot * values_slot + cell * values_position
    if block < query_blocks:
        _turn(
            query + row * query_row + node * query_node, query_head,
            new_query + row * new_query_row + node * new_query_node, new_query_head, keys, keys_head, block * BLOCK,
            cosines, sines, query_weight, eps, HEADS, HALF, HALF_BLOCK, BLOCK, NORM, WEIGHT, ROUND, OFFSET,
            WRITE=False,
        )  # fmt: skip
    elif block < query_blocks + key_blocks:
        _turn(
            key + row * key_row + node * key_node, key_head, new_key + row * new_key_row + node * new_key_node,
            new_key_head, keys, keys_head, (block - query_blocks) * BLOCK, cosines, sines, key_weight, eps, KV_HEADS,
            HALF, HALF_BLOCK, BLOCK, NORM, WEIGHT, ROUND, OFFSET, WRITE,
        )  # fmt: skip
    elif WRITE:
        head = ((block - query_blocks - key_blocks) * BLOCK + tl.arange(0, BLOCK))[:, None]
        wide = tl.arange(0, VALUE_BLOCK)[None, :]
        there = (head < KV_HEADS) & (wide < VALUE_DIM)
        numbers = tl.load(value + row * value_row + node * value_node + head * value_head + wide, mask=there, other=0.0)
        tl.store(values + head * values_head + wide, numbers, mask=there)
