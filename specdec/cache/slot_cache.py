"""The slot cache: every slot has a row of positions, preallocated; written in tree order, committed in one move.

A slot's row holds its committed prefix, and behind it whatever the last tree forward wrote: nothing at or behind
``length`` is ever read without being written first. One row, prefix of 3, then a root and a tree of two
branches, of which the path 2, 3 is accepted::

    position   0   1   2   3   4   5   6
    before     p0  p1  p2  r   n1  n2  n3
    commit     p0  p1  p2  r   n2  n3  n3      new length 6, the rest is garbage
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.cache.base import Cache, LayerShape, Segment, segments
from specdec.cache.pages import Placement
from specdec.forward import ForwardBatch
from specdec.host import can_look
from specdec.kernels import Destination, Stored
from specdec.memory import NoRoomError, free_memory
from specdec.slot_memory import SlotMemory


class SlotCache(Cache):
    """Keys and values of all slots and layers, a row per slot.

    Layers of equal shape share two tensors, ``[layer, slot, position, kv_head, head_dim]`` for K and V, so that
    a commit is one gather and one scatter per tensor. Layers on different devices share none: a layer's entries stay
    where it runs.

    Args:
        shapes: One shape per layer that stores keys and values.
        max_batch_size: The number of slots.
        max_length: Committed positions per slot.
        max_nodes: Further positions per slot, for the nodes of a tree.
        device: Where to put the cache.
        indexers: One shape per layer that selects keys by other keys.

    Raises:
        ValueError: The cache does not fit into the device's free memory.
    """

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        *,
        max_batch_size: int,
        max_length: int,
        max_nodes: int,
        device: torch.device,
        indexers: Mapping[int, LayerShape] | None = None,
    ):
        super().__init__(max(shapes, default=-1) + 1)
        indexers = indexers or {}
        self.slots = max_batch_size
        self.max_length = max_length
        self.positions = max_length + max_nodes
        kept = [*shapes.values(), *indexers.values()]
        self.bytes_per_position = sum(shape.bytes_per_position for shape in kept)
        self._check_memory(kept, device)
        # Zeros, not empty: a masked position still enters 0 * value, and garbage could be NaN.
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._where: dict[int, tuple[int, int]] = {}
        with torch.inference_mode(False):  # an engine may be built in inference mode and used outside
            for shape in dict.fromkeys(shapes.values()):
                size = self._place(shapes, shape, self._where, len(self.keys))
                self.keys.append(_by_head(size, shape.key_heads, shape.key_dim, shape.dtype, shape.device or device))
                self.values.append(
                    _by_head(size, shape.value_heads, shape.value_dim, shape.dtype, shape.device or device)
                )
            self.indexer_keys: list[Tensor] = []
            self._where_indexed: dict[int, tuple[int, int]] = {}
            for shape in dict.fromkeys(indexers.values()):
                size = self._place(indexers, shape, self._where_indexed, len(self.indexer_keys))
                place = shape.device or device
                self.indexer_keys.append(torch.zeros(*size, shape.key_dim, dtype=shape.dtype, device=place))
            self._cells = torch.arange(self.positions, device=device)
        self._views: dict[tuple[int, int], dict[int, tuple[Tensor, Tensor]]] = {}
        self.segments: tuple[Segment, ...] = ()
        self.length = 0
        self._batch: ForwardBatch | None = None
        self._gathered = False
        self._start = -1
        self._indices: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._places = [place for place in places_of(kept, device) if place != self._cells.device]
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def _place(
        self, shapes: Mapping[int, LayerShape], shape: LayerShape, where: dict[int, tuple[int, int]], stack: int
    ) -> tuple[int, int, int]:
        """Give the layers of a shape their places in a stack; returns the leading sizes of its tensors."""
        members = [layer for layer, other in shapes.items() if other == shape]
        where.update({layer: (stack, index) for index, layer in enumerate(members)})
        return len(members), *self._extent

    @property
    def _extent(self) -> tuple[int, int]:
        """The sizes of the second and the third axis of the tensors."""
        return self.slots, self.positions

    def _check_memory(self, kept: Sequence[LayerShape], device: torch.device) -> None:
        check_memory(kept, self.slots, self.max_length, self.positions - self.max_length, device)

    def place(self, placement: Placement) -> None:
        """See ``Cache.place``: every slot has its row."""
        if placement.source not in (None, placement.slot):
            for tensor in self.tensors:
                tensor[:, placement.slot, : placement.reused] = tensor[:, placement.source, : placement.reused]

    def save(self, slot: int, count: int) -> list[Tensor]:
        return [tensor[:, *self._run(tensor, slot, 0, count)].to("cpu", copy=True) for tensor in self.tensors]

    def load(self, slot: int, saved: Sequence[Tensor]) -> None:
        for tensor, kept in zip(self.tensors, saved, strict=True):
            tensor[:, *self._run(tensor, slot, 0, kept.shape[1])] = kept.to(tensor.device)

    def _at(self, slots: Int[Tensor, " batch"], positions: Int[Tensor, "batch position"]) -> tuple[Tensor, Tensor]:
        """Return where positions of slots stand: indices of the second and the third axis of the tensors."""
        return slots[:, None], positions

    def _run(self, tensor: Tensor, slot: int, start: int, stop: int) -> tuple[int | Tensor, slice | Tensor]:
        """Return where some positions of one slot stand, likewise."""
        return slot, slice(start, stop)

    def aim(self, batch: ForwardBatch) -> None:
        """Prepare for a forward: where it writes, and how much of the rows it reads.

        Where looking at slots and lengths is free, runs of consecutive slots are shown without a copy, and a single row
        is written as a slice.
        """
        rows, nodes, width = batch.batch, batch.nodes, batch.topology.width
        look = can_look(batch.lengths)
        self.length = self._needed(batch, look=look)
        self._batch = batch
        self._gathered = not look
        everything = (Segment(slice(0, rows), slice(0, self.slots)),)  # all rows, gathered from all slots
        self.segments = segments(tuple(batch.slots.tolist())) if look else everything
        if len(self.segments) == 1:
            self._layers = self.views(self.segments[0])
        self._start = int(batch.lengths) + width - nodes if look and rows == 1 else -1
        if self._start < 0:
            cells = batch.lengths[:, None] + self._cells[width - nodes : width]
            # This index holds however the rows are cut into segments.
            index = self._at(batch.slots, cells.clamp(max=self.positions - 1))
            self._indices = {cells.device: index}
            for place in self._places:  # one copy for all layers there
                self._indices[place] = (index[0].to(place), index[1].to(place))

    def _needed(self, batch: ForwardBatch, *, look: bool) -> int:
        """Return how many positions of a slot a forward reads.

        Short prompts are padded beside long ones: padding that would fall off the row's end stays at its end.
        """
        if batch.key_bound is not None:
            return min(batch.key_bound, self.positions)
        longest = int(batch.lengths.max()) + batch.topology.width if look else self.positions
        return min(longest, self.positions)

    def views(self, segment: Segment) -> dict[int, tuple[Tensor, Tensor]]:
        """Returns keys and values of every layer in a run of slots, ``[slot, kv_head, position, head_dim]``."""
        ends = (segment.slots.start, segment.slots.stop)
        if ends not in self._views:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[ends] = {
                index: (
                    self.keys[stack][layer, segment.slots].transpose(1, 2),
                    self.values[stack][layer, segment.slots].transpose(1, 2),
                )
                for index, (stack, layer) in self._where.items()
            }
        return self._views[ends]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store ``[batch, kv_head, node, head_dim]`` where ``aim`` said."""
        if self._start >= 0:
            nodes = keys.shape[2]
            kept_keys, kept_values = self._layers[layer]
            kept_keys.narrow(2, self._start, nodes).copy_(keys)
            kept_values.narrow(2, self._start, nodes).copy_(values)
        else:
            kept_keys, kept_values, *index = self._destination(layer)
            if keys.dtype is not kept_keys.dtype or values.dtype is not kept_values.dtype:  # under autocast
                keys, values = keys.to(kept_keys.dtype), values.to(kept_values.dtype)
            kept_keys[tuple(index)] = keys.transpose(1, 2)
            kept_values[tuple(index)] = values.transpose(1, 2)

    def destination(self, layer: int) -> Destination | None:
        return self._destination(layer) if self._start < 0 else None

    def _destination(self, layer: int) -> Destination:
        stack, place = self._where[layer]
        keys, values = self.keys[stack][place], self.values[stack][place]
        return Destination(keys, values, *self._indices[keys.device])

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns all that attention may see: a view if the slots are consecutive, otherwise a copy."""
        if len(self.segments) == 1:
            keys, values = self._layers[layer]
            keys, values = keys.narrow(2, 0, self.length), values.narrow(2, 0, self.length)
            if self._gathered:
                assert self._batch is not None
                return keys.index_select(0, self._batch.slots), values.index_select(0, self._batch.slots)
            return keys, values
        parts = [self.read_segment(layer, segment) for segment in self.segments]
        return torch.cat([keys for keys, _ in parts]), torch.cat([values for _, values in parts])

    def stored(self, layer: int) -> Stored:
        stack, place = self._where[layer]
        return Stored(self.keys[stack][place].transpose(1, 2), self.values[stack][place].transpose(1, 2))

    def read_segment(self, layer: int, segment: Segment) -> tuple[Tensor, Tensor]:
        """Returns views of what attention may see of one run of slots."""
        keys, values = self.views(segment)[layer]
        return keys.narrow(2, 0, self.length), values.narrow(2, 0, self.length)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Write ``[batch, node, dim]`` and return all that the indexer may choose from."""
        stack, place = self._where_indexed[layer_idx]
        kept = self.indexer_keys[stack][place]
        if self._start >= 0:
            row = kept[self.segments[0].slots]
            row.narrow(1, self._start, indexer_key_states.shape[1]).copy_(indexer_key_states)
        else:
            kept[self._indices[kept.device]] = indexer_key_states
        return self._read_indexer(kept)

    def _read_indexer(self, kept: Tensor) -> Tensor:
        """Return what an indexer may choose from, ``[batch, key, dim]``."""
        assert self._batch is not None
        if len(self.segments) == 1 and not self._gathered:
            return kept[self.segments[0].slots].narrow(1, 0, self.length)
        return kept.index_select(0, self._batch.slots.to(kept.device)).narrow(1, 0, self.length)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length, 0

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the cache, each ``[layer, slot, position, ...]``."""
        return [*self.keys, *self.values, *self.indexer_keys]

    def move(
        self, slots: Int[Tensor, " batch"], lengths: Int[Tensor, " batch"], path: Int[Tensor, "batch depth"]
    ) -> None:
        depth = path.shape[1]
        goal = lengths[:, None] + self._cells[1 : depth + 1]
        # Padding moves a position onto itself; length + depth <= (max_length - 1) + max_nodes is inside the row.
        source = torch.where(path >= 0, lengths[:, None] + path, goal)
        moves = {lengths.device: (self._at(slots, goal), self._at(slots, source))}
        for place in self._places:
            to, of = moves[lengths.device]
            moves[place] = (to[0].to(place), to[1].to(place)), (of[0].to(place), of[1].to(place))
        for tensor in self.tensors:
            (rows, goal), (others, source) = moves[tensor.device]
            tensor[:, rows, goal] = tensor[:, others, source]

    def clear(self, slot: int, *, start: int = 0, stop: int | None = None) -> None:
        for tensor in self.tensors:
            tensor[:, *self._run(tensor, slot, start, self.positions if stop is None else stop)] = 0


def places_of(shapes: Iterable[LayerShape], device: torch.device) -> dict[torch.device, int]:
    """Returns the devices that layers of these shapes run on, with their bytes per position."""
    bytes_on: dict[torch.device, int] = {}
    for shape in shapes:
        place = shape.device or device
        bytes_on[place] = bytes_on.get(place, 0) + shape.bytes_per_position
    return bytes_on


def check_memory(shapes: Iterable[LayerShape], rows: int, length: int, nodes: int, device: torch.device) -> None:
    """Refuse a cache that does not fit into the free memory of one of its devices.

    Args:
        nodes: Further positions per slot.
        device: Where layers run that have no device of their own.

    Raises:
        NoRoomError: Says how much it needs, how much there is, and what would fit.
    """
    for place, size in places_of(shapes, device).items():
        cache, free = SlotMemory(per_position=size, drafted=nodes), free_memory(place)
        if cache.bytes(rows=rows, length=length) > free:
            raise NoRoomError(cache, rows=rows, length=length, place=place, free=free)


_MOST_VIEWS = 256  # runs of slots whose views are kept


def _by_head(size: tuple[int, int, int], heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros of shape ``[layer, slot, position, head, dim]`` that lie head by head in memory.

    Attention multiplies the positions of one head with its queries. In this layout they stand side by side, and slots
    and heads form one batch of matrices without a copy. (Up to ten times faster on a CPU in bf16 at 1024 positions.)
    """
    layers, slots, positions = size
    return torch.zeros(layers, slots, heads, positions, dim, dtype=dtype, device=device).transpose(2, 3)
