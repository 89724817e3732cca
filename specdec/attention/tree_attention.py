"""Launches the kernels of tree attention: which tiles, how many pieces, and where everything lies in memory."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.runtime import JITFunction

from specdec.attention.facts import Reach
from specdec.attention.tree_kernel import attend_piece, merge_pieces
from specdec.cache.base import Stored

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
INTERPRETED = not isinstance(attend_piece, JITFunction)
"""Whether Triton runs kernels on the CPU, operation by operation, as it was told when it was imported."""

PROGRAMS_PER_PROCESSOR = 4
"""How many programs a GPU's multiprocessor gets, if the context is long enough to be cut into so many pieces."""

LEAST_KEYS = 128
"""Positions in a piece, at least: below that, joining the pieces costs more than reading them one after the other."""

MOST_PIECES = 128


@dataclass(frozen=True, eq=False)
class Seen:
    """What the queries of a forward see: the prefix of their row, and their ancestors in the tree behind it.

    Attributes:
        lengths: Positions of every row's prefix.
        table: The pages of every row, in order: indices along the first axis of ``Stored``'s tensors.
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


class Tiles(NamedTuple):
    """How a launch is divided.

    Attributes:
        queries: Queries (nodes times query heads of a key head) per program.
        keys: Positions per step of a program.
        warps: Warps per program.
        stages: Steps whose keys and values are on their way at the same time.
    """

    queries: int
    keys: int
    warps: int
    stages: int


def tree_attention(
    query: Float[Tensor, "batch head query head_dim"],
    stored: Stored,
    seen: Seen,
    *,
    reach: Reach = Reach(),  # noqa: B008 (immutable)
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
        reach: The layer's window or chunk, counted in positions of the sequence (``length + depth``).
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
    scale_strides = [stride for tensor in scales for stride in _strides(tensor)] if scaled else [0] * 6
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
            query,
            stored.keys,
            stored.values,
            *scales,
            nothing if sinks is None else sinks,
            output,
            totals,
            logs,
            seen.lengths,
            seen.table,
            nothing if seen.words is None else seen.words,
            seen.depth,
            head_dim**-0.5 if scaling is None else scaling,
            1.0 if softcap is None else softcap,
            nodes,
            seen.depth.shape[1],
            positions,
            pieces,
            page_size,
            *query.stride()[:3],
            *_strides(stored.keys),
            *_strides(stored.values),
            *scale_strides,
            seen.table.stride(0),
            *word_strides,
            _row_stride(seen.depth),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            BLOCK_M=tiles.queries,
            BLOCK_N=tiles.keys,
            BLOCK_D=low,
            BLOCK_REST=0 if rest <= 0 else max(16, triton.next_power_of_2(rest)),
            BLOCK_V=block_v,
            IN_PIECES=split,
            IN_LINE=seen.words is None,
            PAGED=seen.table.shape[1] > 1,
            SCALED=scaled,
            SOFTCAP=softcap is not None,
            SINKS=sinks is not None,
            WINDOW=reach.window or 0,
            CHUNK=reach.chunk or 0,
            COMPUTE=compute,
            ROUND=dtype,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            enable_fp_fusion=True,  # Triton's present default, which it announces to change
        )
        if split:
            kernel = merge_pieces
            kernel[(rows * nodes, heads)](
                totals,
                logs,
                nothing if sinks is None else sinks,
                output,
                pieces,
                HEADS=heads,
                VALUE_DIM=value_dim,
                BLOCK_V=block_v,
                BLOCK_S=triton.next_power_of_2(pieces),
                STEP=min(16, triton.next_power_of_2(pieces)),
                SINKS=sinks is not None,
                ROUND=dtype,
                num_warps=4,
                enable_fp_fusion=True,
            )
    return output


def choose_pieces(programs: int, keys: int, available: int) -> int:
    """Return the number of pieces of a context of ``keys`` positions, for launches of so many programs if it is whole.

    ``available`` is the number of the device's multiprocessors.
    """
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * available, programs)
    return max(1, min(wanted, triton.cdiv(keys, LEAST_KEYS), MOST_PIECES))


def choose_tiles(queries: int, head_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Return tiles that fit into a multiprocessor's registers and shared memory.

    They were chosen by what ptxas reports for compute capability 9.0 (Triton 3.9): in half precision no register is
    spilled to memory, but for a few bytes with scales or chunks. Their speed has not been measured.
    """
    wide = max(head_dim, value_dim)
    if dtype is torch.float32:  # without tensor cores, all of it stands in registers
        most, widest_step = 16, 32 if wide <= 128 else 16
    else:
        most, widest_step = (128, 128) if wide <= 128 else (64, 64) if wide <= 256 else (16, 32)
    block = min(most, max(16, triton.next_power_of_2(queries)))
    room = int(0.9 * shared_memory(device))
    for keys, stages in ((128, 2), (64, 3), (64, 2), (32, 3), (32, 2), (32, 1)):
        if keys > widest_step or block * keys > 128 * 64 or (keys == 128 and block > 32):
            continue  # the scores would not fit into the registers
        if (block * head_dim + stages * keys * (head_dim + value_dim)) * dtype.itemsize <= room:
            break
    else:
        keys, stages = 16, 1
    return Tiles(block, keys, 8 if block == 128 or block * wide >= 32 * 256 or wide > 256 else 4, stages)


@lru_cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 on a CPU, where the interpreter runs one program after the other."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may have."""
    if device.type == "cpu":
        return 96 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 64 * 1024)


def _strides(tensor: Any) -> tuple[int, int, int]:
    """Return the strides of page, head and position."""
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


def _row_stride(tensor: Tensor) -> int:
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)
