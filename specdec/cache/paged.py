"""Keys and values in pages of a few positions, which slots can share."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.cache.layout import LayerShape, Segment, check_memory
from specdec.cache.pages import Paging, Placement
from specdec.cache.storage import Cache
from specdec.forward import ForwardBatch
from specdec.host import can_look


class PagedCache(Cache):
    """Keys and values in pages, ``[layer, page, position, kv_head, head_dim]`` (PagedAttention, Kwon et al. 2023).

    It takes memory for the tokens that there are, not for the longest that there could be, and slots can share pages.
    The Triton kernel reads the table. Other attention gets a copy of each row, layer by layer: right, and slow.

    Which pages a slot has is decided for all caches of an engine at once (``specdec.cache.pages``). What lies behind
    them (nodes of a draft near the longest output, padding of prompts) goes to a few pages of the slot's own, in a ring
    that is longer than any draft. A slot without a request has nothing else.

    Args:
        paging: The size and the number of pages. All other arguments: see ``Cache``.
    """

    def __init__(
        self, shapes: Mapping[int, LayerShape], paging: Paging, *, max_batch_size: int, max_nodes: int, **others: Any
    ):
        assert paging.page_size is not None and paging.pages is not None, "filled in"
        self._size, ring = paging.page_size, -(-max(max_nodes, 1) // paging.page_size) + 1
        self._most = max_batch_size * ring + paging.pages
        super().__init__(shapes, max_batch_size=max_batch_size, max_nodes=max_nodes, **others)
        width = -(-self.positions // self._size)
        with torch.inference_mode(False):
            rings = paging.pages + torch.arange(max_batch_size * ring, device=self._cells.device).view(-1, ring)
            self._rings = rings.repeat(1, -(-width // ring))[:, :width].contiguous()
            self._table = self._rings.clone()
        self._seen = self._table[:0]

    @property
    def _extent(self) -> tuple[int, int]:
        """The number of pages, and their size."""
        return self._most, self._size

    def _check_memory(self, places: Mapping[torch.device, int]) -> None:
        check_memory(places, self._most, self._size, 0)

    def place(self, placement: Placement) -> None:
        slot, pages = placement.slot, torch.tensor(placement.pages, dtype=torch.long)
        self._table[slot] = self._rings[slot]
        self._table[slot, : len(pages)] = pages.to(self._table.device, non_blocking=True)

    def vacate(self, slot: int) -> None:
        super().vacate(slot)
        self._table[slot] = self._rings[slot]

    def _at(self, slots: Int[Tensor, " batch"], positions: Int[Tensor, "batch position"]) -> tuple[Tensor, Tensor]:
        return self._table[slots].gather(1, positions // self._size), positions % self._size

    def _run(self, tensor: Tensor, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, stop, device=self._table.device)
        pages = self._table[slot][positions // self._size]
        return pages.to(tensor.device), (positions % self._size).to(tensor.device)

    def aim(self, batch: ForwardBatch) -> None:
        """Prepare for a forward: where it writes, and which pages it reads."""
        self.length = self._needed(batch, look=can_look(batch.lengths))
        self.segments = (Segment(slice(0, batch.batch), slice(0, self.slots)),)
        self._indices = self._everywhere(self._at(batch.slots, self._written(batch)))
        self._seen = self._table[batch.slots, : -(-self.length // self._size)]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a copy of all that attention may see."""
        return self._shown(layer, [self._gather(part.transpose(1, 2)) for part in self._parts(layer)])

    def read_segment(self, layer: int, segment: Segment) -> tuple[Tensor, Tensor]:
        """See ``Cache.read_segment``: there is one segment, of all rows."""
        return self.read(layer)

    def _gather(self, stored: Tensor) -> Tensor:
        """Return the rows of this forward, ``[batch, kv_head, key, head_dim]``."""
        pages = stored[self._seen.to(stored.device)]  # [batch, page, kv_head, position, head_dim]
        return pages.transpose(1, 2).flatten(2, 3).narrow(2, 0, self.length)

    def _read_indexer(self, kept: Tensor) -> Tensor:
        return kept[self._seen.to(kept.device)].flatten(1, 2).narrow(1, 0, self.length)

    def pages(self, slots: Int[Tensor, " batch"]) -> Int[Tensor, "batch page"]:
        return self._table[slots]

    def cells(self, stored: Tensor, slot: int, positions: slice | Int[Tensor, " key"]) -> Tensor:
        if isinstance(positions, slice):
            positions = self._cells[positions]
        pages = self._table[slot][positions // self._size]
        return stored[pages, :, positions % self._size].transpose(0, 1)


def cache_of(shapes: Mapping[int, LayerShape], paging: Paging | None, **options: Any) -> Cache:
    """Return an empty cache of rows, or of pages if their size is given; the arguments are those of ``PagedCache``."""
    if paging is None or paging.page_size is None:
        return Cache(shapes, **options)
    return PagedCache(shapes, paging, **options)
