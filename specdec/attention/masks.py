"""Additive attention masks for queries that stand in a tree behind a committed prefix."""

from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.attention.facts import Facts, Reach
from specdec.forward import ForwardBatch
from specdec.host import can_look

_EVERYTHING = Reach()


def dense_masks(batch: ForwardBatch, length: int, facts: Facts) -> list[Tensor]:
    """Return the masks of a forward over ``length`` keys, one per reach of the layers, ``[batch, 1, node, key]``."""
    return [_mask(batch, length, facts.dtype, reach) for reach in facts.distinct_reaches]


def _mask(batch: ForwardBatch, length: int, dtype: torch.dtype, reach: Reach) -> Float[Tensor, "batch 1 node key"]:
    topology, nodes, rows = batch.topology.in_layers(windowed=reach.window is not None), batch.nodes, batch.batch
    start = int(batch.lengths) if rows == 1 and can_look(batch.lengths) else None
    if start is not None and reach == _EVERYTHING and start + topology.width >= length:
        if batch.nodes == 1 and batch.topology.in_line:  # nothing is hidden from it
            return torch.zeros(1, 1, 1, length, dtype=dtype, device=batch.lengths.device)
        visible = topology.ancestors[0]
        return row_mask(start, visible if nodes == topology.width else visible[-nodes:], length, dtype)
    cells = batch.lengths[:, None] + topology.depth
    return tree_mask(
        batch.lengths,
        topology.ancestors[:, -nodes:].expand(rows, -1, -1),
        length,
        dtype,
        query_positions=cells[:, -nodes:],
        cell_positions=cells,
        window=reach.window,
        chunk=reach.chunk,
    )


def tree_mask(
    starts: Int[Tensor, " batch"], visible: Bool[Tensor, "batch query cell"], length: int, dtype: torch.dtype, *,
    query_positions: Int[Tensor, "batch query"] | None = None, cell_positions: Int[Tensor, "batch cell"] | None = None,
    window: int | None = None, chunk: int | None = None,
) -> Float[Tensor, "batch 1 query key"]:  # fmt: skip
    """Return an additive mask: 0 where a query may attend to a key, -inf where it may not.

    Every row's cache holds a prefix of ``starts`` positions, which all queries see, and behind it the cells of the
    tree (or of a prefill chunk). Of these, each query sees itself and its ancestors.

    With a prefix of 2, cells root - a with a second child b of the root, and ``length`` 6::

        root  . . . x x x      (. visible, x hidden)
        a     . . . . x x
        b     . . . x . x

    Args:
        starts: Position of each row's first cell.
        visible: Which cells each query sees. Each query must see at least one.
        length: The number of key positions.
        dtype: The dtype of the mask, which is the model's.
        query_positions, cell_positions: Logical positions (start + depth); needed with a window or chunks.
        window: A query sees keys less than this many positions back; None sees all.
        chunk: A query sees keys of its own chunk of this many positions, counted from the row's beginning; None
            sees all.
    """
    batch, queries, cells = visible.shape
    key = torch.arange(length, device=starts.device)
    cell = key - starts[:, None]
    in_prefix = cell < 0
    in_tree = (cell >= 0) & (cell < cells)
    index = cell.clamp(0, cells - 1)
    seen = visible.gather(2, index[:, None].expand(batch, queries, length))
    seen = (seen & in_tree[:, None]) | in_prefix[:, None]
    if window is not None or chunk is not None:
        assert query_positions is not None and cell_positions is not None
        position = torch.where(in_prefix, key, cell_positions.gather(1, index))[:, None]
        query = query_positions[:, :, None]
        if window is not None:
            seen &= query - position < window
        if chunk is not None:
            seen &= query // chunk == position // chunk
    mask = torch.zeros(batch, 1, queries, length, dtype=dtype, device=starts.device)
    return mask.masked_fill_(~seen[:, None], -torch.inf)


def row_mask(
    start: int, visible: Bool[Tensor, "query cell"], length: int, dtype: torch.dtype
) -> Float[Tensor, "1 1 query key"]:
    """Return ``tree_mask`` for a single row without windows; quicker, because the host knows where its cells stand.

    ``length`` is that of the prefix and the cells, or less (at the end of the cache, or where nothing is read).
    """
    mask = torch.zeros(1, 1, visible.shape[0], length, dtype=dtype, device=visible.device)
    mask[0, 0, :, start:].masked_fill_(~visible[:, : max(length - start, 0)], -torch.inf)
    return mask


@lru_cache(maxsize=64)
def stand_ins(count: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return a tensor for each reach of a model's layers, to be passed where masks are by a backend that reads none."""
    with torch.inference_mode(False):
        return [torch.zeros(1, 1, 1, 1, dtype=dtype, device=device) for _ in range(count)]
