"""What stands between the products of a forward: norms, gates, and rotary embedding with the write behind it.

Kernels round where the model's own operations round, so that little but the order of sums tells the two apart. Products
and sums are not contracted to one operation, which would round less. Nothing here reads a value on the device, so that
a launch can be captured in a graph.
"""
# ruff: noqa: N803 (a kernel's constants are written in capitals)

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.runtime import JITFunction

from specdec.kernels import Destination

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_BLOCK = 1024  # of a gate
_HEADS = 4  # heads of a program

HeadNorm = tuple[Tensor | None, float, bool, float]
"""The norm of every head before it is turned: weight, eps, rounds and offset, as in ``norm``."""


@triton.jit
@no_type_check
def rounded(numbers, DTYPE: tl.constexpr):
    """Returns float32 numbers, rounded to a dtype."""
    if _CUTS and tl.bfloat16 == DTYPE:
        bits = numbers.to(tl.int32, bitcast=True)
        numbers = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return numbers.to(DTYPE).to(tl.float32)


_CUTS = tl.constexpr(not isinstance(rounded, JITFunction))
"""Triton's interpreter cuts off what bfloat16 does not hold."""


def norm(
    x: Float[Tensor, "*row width"], weight: Float[Tensor, " width"] | None, eps: float, rounds: bool, offset: float
) -> Float[Tensor, "*row width"]:
    """Return ``x``, which has at most four axes, normalized.

    Args:
        x: What is normalized, row by row.
        weight: Factors; None for none.
        eps: Added to the mean of the squares.
        rounds: The normalized numbers are rounded to their dtype before they are multiplied by the weight (Llama), or
            only the products are (Gemma).
        offset: Added to the weight: Gemma's are distances from 1.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    output = torch.empty_like(x)
    _launch(x, x, weight, output, x, eps, rounds, offset, add=False)
    return output


def add_norm(
    x: Float[Tensor, "*row width"],
    residual: Float[Tensor, "*row width"],
    weight: Float[Tensor, " width"] | None,
    eps: float,
    rounds: bool,
    offset: float,
) -> tuple[Float[Tensor, "*row width"], Float[Tensor, "*row width"]]:
    """Return ``x + residual``, normalized, and the sum itself, which is rounded to its dtype before its norm."""
    x, residual = x.contiguous(), residual.contiguous()
    output, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, output, total, eps, rounds, offset, add=True)
    return output, total


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor | None, output: Tensor, total: Tensor, eps: float, rounds: bool,
    offset: float, *, add: bool,
) -> None:  # fmt: skip
    width, missing = x.shape[-1], 4 - x.dim()
    _, middle, inner = (1,) * missing + tuple(x.shape[:-1])
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        kernel: Any = norm_rows
        kernel[(x.numel() // width,)](
            x, residual, x if weight is None else weight, output, total, middle, inner, *(0,) * missing,
            *x.stride()[:-1], *(0,) * missing, *output.stride()[:-1], eps, WIDTH=width, BLOCK=block, ADD=add,
            WEIGHT=weight is not None, ROUND=rounds, OFFSET=offset, num_warps=min(16, max(1, block // 512)),
            enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["middle", "inner"])  # not compiled anew for other numbers of rows
@no_type_check
def norm_rows(
    x, residual, weight, output, total, middle, inner, outer_stride, middle_stride, inner_stride, outer_out,
    middle_out, inner_out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr,
    ROUND: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Normalizes one row, which stands in registers."""
    row = tl.program_id(0)
    last, rest = row % inner, row // inner
    second, first = rest % middle, (rest // middle).to(tl.int64)
    column = tl.arange(0, BLOCK)
    real = column < WIDTH
    place = first * outer_stride + second * middle_stride + last * inner_stride + column
    to = first * outer_out + second * middle_out + last * inner_out + column
    dtype: tl.constexpr = output.dtype.element_ty
    numbers = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    if ADD:
        numbers = rounded(numbers + tl.load(residual + place, mask=real, other=0.0).to(tl.float32), dtype)
        tl.store(total + to, numbers.to(dtype), mask=real)
    numbers = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / WIDTH + eps)
    if ROUND:
        numbers = rounded(numbers, dtype)
    if WEIGHT:
        numbers = numbers * (tl.load(weight + column, mask=real, other=0.0).to(tl.float32) + OFFSET)
    tl.store(output + to, rounded(numbers, dtype).to(dtype), mask=real)


def gated(gate: Float[Tensor, "*row width"], up: Float[Tensor, "*row width"], activation: str) -> Tensor:
    """Return ``activation(gate) * up``, in order of its axes; the activation is rounded to its dtype."""
    width = gate.shape[-1]
    gate_rows, up_rows = _rows(gate), _rows(up)
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    with torch.cuda.device_of(gate):  # Triton launches on the current device
        kernel: Any = gate_row
        kernel[(gate_rows.shape[0], triton.cdiv(width, _BLOCK))](
            gate_rows, up_rows, output, gate_rows.stride(0), up_rows.stride(0), WIDTH=width, BLOCK=_BLOCK,
            ACTIVATION=ACTIVATIONS[activation], num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return output


def _rows(tensor: Tensor) -> Float[Tensor, "row width"]:
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor.reshape(-1, tensor.shape[-1])


@triton.jit
@no_type_check
def gate_row(
    gate, up, output, gate_stride, up_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):
    """Computes a block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < WIDTH
    x = tl.load(gate + row * gate_stride + column, mask=real, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        active = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == 1:
        active = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        small = tl.exp(-2.0 * tl.abs(inner))
        tanh = (1.0 - small) / (1.0 + small)
        active = 0.5 * x * (1.0 + tl.where(inner < 0, -tanh, tanh))
    dtype: tl.constexpr = output.dtype.element_ty
    factor = tl.load(up + row * up_stride + column, mask=real, other=0.0).to(tl.float32)
    product = rounded(rounded(active, dtype) * factor, dtype)
    tl.store(output + row * WIDTH + column, product.to(dtype), mask=real)


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
