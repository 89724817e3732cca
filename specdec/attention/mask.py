"""Additive attention masks for queries that stand in a tree behind a committed prefix."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def tree_mask(
    starts: Int[Tensor, " batch"],
    visible: Bool[Tensor, "batch query cell"],
    length: int,
    dtype: torch.dtype,
    *,
    query_positions: Int[Tensor, "batch query"] | None = None,
    cell_positions: Int[Tensor, "batch cell"] | None = None,
    window: int | None = None,
    chunk: int | None = None,
) -> Float[Tensor, "batch 1 query key"]:
    """What each query may attend to: 0 where it may, -inf where not.

    Every row's cache holds a prefix of ``starts`` positions, all of it visible, and behind it the cells of the
    tree (or of a prefill chunk), of which each query sees its ancestors and itself.

    With a prefix of 2, cells root - a with a second child b of the root, and ``length`` 6::

        root  . . . x x x      (. visible, x hidden)
        a     . . . . x x
        b     . . . x . x

    Args:
        starts: Position of each row's first cell.
        visible: Which cells each query sees. Each query must see at least one.
        length: Key positions in all.
        dtype: Of the mask, the model's.
        query_positions: Logical position of each query (start + depth); needed with a window or chunks.
        cell_positions: Logical position of each cell; needed with a window or chunks.
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
    start: int,
    visible: Bool[Tensor, "query cell"],
    length: int,
    dtype: torch.dtype,
    *,
    groups: int,
    sees_all: bool = False,
) -> Float[Tensor, "1 1 grouped_query key"]:
    """``tree_mask`` for one row whose layers see everything: quicker, because the host knows where the cells stand.

    Args:
        start: Position of the first cell.
        visible: Which cells each query sees.
        length: Key positions in all: ``start`` and the cells, or fewer of them at the end of the cache.
        dtype: Of the mask.
        groups: How often to repeat the queries' rows.
        sees_all: All cells are visible to all queries, and the host knows it.
    """
    queries, cells = visible.shape
    mask = torch.zeros(1, 1, groups * queries, length, dtype=dtype, device=visible.device)
    if cells > 1 and not sees_all:
        hidden = torch.zeros(queries, cells, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
        mask.view(groups, queries, length)[:, :, start:] = hidden[:, : length - start]
    return mask
