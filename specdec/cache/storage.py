"""Keys and values of all slots in rows, as numbers of the model's dtype or as codes with factors.

What a slot holds is a committed prefix, and behind it whatever the last tree forward wrote, in tree order: nothing at
or behind ``length`` is ever read without being written first. One slot, a prefix of 3, then a root and a tree of two
branches, of which the path 2, 3 is accepted::

    position   0   1   2   3   4   5   6
    before     p0  p1  p2  r   n1  n2  n3
    commit     p0  p1  p2  r   n2  n3  n3      new length 6, the rest is garbage

An entry of a quantized cache is quantized once, when it is written, and from then on only moved. Attention always reads
stored entries, also those of the forward's own nodes. So a token that was verified in a tree leaves the entry that it
would have left in plain decoding, and both follow one distribution: that of the model with a quantized cache.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.cache.formats import Format, QuantizedTensor, check_device
from specdec.cache.layout import LayerShape, Segment, check_memory, places_of, segments, zeros_by_head
from specdec.cache.pages import Placement
from specdec.cache.states import States
from specdec.cache.transformers_cache import OwnLayout
from specdec.forward import ForwardBatch
from specdec.host import can_look
from specdec.kernels import Destination, Stored

_MOST_VIEWS = 256  # runs of slots whose views are kept


class Cache(OwnLayout):
    """Keys and values of all slots and layers, a row per slot.

    A forward is announced with ``aim``; the model's layers then ``write`` what they compute and ``read`` what attention
    may see (transformers calls both together, as ``update``). After a round, ``commit`` moves the accepted path's
    entries to their places.

    Layers of equal shape share tensors ``[layer, slot, position, kv_head, head_dim]``, so that a commit is one gather
    and one scatter per tensor. Layers on different devices share none: a layer's entries stay where it runs.

    Args:
        shapes: One shape per layer that stores keys and values.
        max_batch_size: The number of slots.
        max_length: Committed positions per slot.
        max_nodes: Further positions per slot, for the nodes of a tree.
        device: Where to put the cache.
        indexers: One shape per layer that selects keys by other keys, which are never quantized.
        format: How numbers are stored; None for the layers' own dtypes.

    Attributes:
        slots: The number of slots.
        max_length: As given.
        positions: The number of positions in a slot, including those for the nodes of a tree.
        bytes_per_position: Bytes that one position of one slot takes, over all layers.
        segments: The runs of consecutive slots in the batch of the next forward, if they can be shown without a copy;
            otherwise one run with all rows.
        length_used: Whether a layer has asked how long the cache is. A ragged batch has no answer to that.
        states: The states of recurrent layers; None for a model without any.
        keys, values: Numbers or codes, by group of layers.
        scales: The factors of codes, of keys and of values, by group of layers; empty without a format.

    Raises:
        ValueError: The cache does not fit into the device's free memory, or the device cannot compute the format.
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
        format: Format | None = None,
    ):
        super().__init__(max(shapes, default=-1) + 1)
        if format is not None:
            check_device(format, device)
        indexers = indexers or {}
        self.format = format
        self.slots, self.max_length, self.positions = max_batch_size, max_length, max_length + max_nodes
        self.length_used = False
        self.states: States | None = None
        places: dict[torch.device, int] = {}  # bytes per position there
        for shape in (*shapes.values(), *indexers.values()):
            quantized = format is not None and shape.value_heads
            size = shape.bytes_quantized if quantized else shape.bytes_per_position
            places[shape.device or device] = places.get(shape.device or device, 0) + size
        self.bytes_per_position = sum(places.values())
        self._check_memory(places)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.scales: list[tuple[Tensor, Tensor]] = []
        self.indexer_keys: list[Tensor] = []
        self._dtypes = {layer: shape.dtype for layer, shape in shapes.items()}
        self._where, self._where_indexed = places_of(shapes), places_of(indexers)
        with torch.inference_mode(False):  # an engine may be built in inference mode and used outside
            for shape in dict.fromkeys(shapes.values()):
                layers, place = sum(other == shape for other in shapes.values()), shape.device or device
                dtype = shape.dtype if format is None else torch.int8
                sizes = (shape.key_heads, shape.key_dim), (shape.value_heads, shape.value_dim)
                keys, values = (zeros_by_head(layers, self._extent, *size, dtype, place) for size in sizes)
                self.keys.append(keys)
                self.values.append(values)
                if format is not None:
                    of_keys, of_values = (
                        zeros_by_head(layers, self._extent, heads, 1, torch.float32, place) for heads, _ in sizes
                    )
                    self.scales.append((of_keys, of_values))
            for shape in dict.fromkeys(indexers.values()):
                layers, place = sum(other == shape for other in indexers.values()), shape.device or device
                size = layers, *self._extent, shape.key_dim
                self.indexer_keys.append(torch.zeros(size, dtype=shape.dtype, device=place))
            self._cells = torch.arange(self.positions, device=device)
        self._views: dict[tuple[int, int], dict[int, tuple[Tensor, ...]]] = {}
        self.segments: tuple[Segment, ...] = ()
        self._batch: ForwardBatch | None = None
        self.length, self._start, self._gathered = 0, -1, False
        self._indices: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._places = [place for place in places if place != self._cells.device]
        self._layers: dict[int, tuple[Tensor, ...]] = {}

    @property
    def quantized(self) -> bool:
        """Whether keys and values are stored in other numbers than the model's."""
        return self.format is not None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the cache, each ``[layer, slot, position, ...]``."""
        return [*self.keys, *self.values, *self.indexer_keys, *itertools.chain(*self.scales)]

    @property
    def _extent(self) -> tuple[int, int]:
        """The sizes of the second and the third axis of the tensors."""
        return self.slots, self.positions

    def _check_memory(self, places: Mapping[torch.device, int]) -> None:
        check_memory(places, self.slots, self.max_length, self.positions - self.max_length)

    def _parts(self, layer: int) -> tuple[Tensor, ...]:
        """Return a layer's keys and values, and their factors if there are some, ``[slot, position, kv_head, dim]``."""
        stack, place = self._where[layer]
        more = self.scales[stack] if self.scales else ()
        return tuple(tensor[place] for tensor in (self.keys[stack], self.values[stack], *more))

    def place(self, placement: Placement) -> None:
        """Begin a request: let its slot have its pages, and copy the beginning that another slot holds."""
        if placement.source not in (None, placement.slot):
            for tensor in self.tensors:
                tensor[:, placement.slot, : placement.reused] = tensor[:, placement.source, : placement.reused]

    def vacate(self, slot: int) -> None:
        """End a slot's request: whatever is written for this slot now must not reach pages that are others' soon."""
        if self.states is not None:
            self.states.clear(slot)

    def save(self, slot: int, count: int) -> list[Tensor]:
        """Return a slot's first positions as tensors in the host's memory."""
        return [tensor[:, *self._run(tensor, slot, 0, count)].to("cpu", copy=True) for tensor in self.tensors]

    def load(self, slot: int, saved: Sequence[Tensor]) -> None:
        """Write what ``save`` has returned to the first positions of a slot."""
        for tensor, kept in zip(self.tensors, saved, strict=True):
            tensor[:, *self._run(tensor, slot, 0, kept.shape[1])] = kept.to(tensor.device)

    def clear(self, slot: int, *, start: int = 0, stop: int | None = None) -> None:
        """Forget entries up to ``stop``, or all, that may be NaN, which would leak through masked positions."""
        for tensor in self.tensors:
            tensor[:, *self._run(tensor, slot, start, self.positions if stop is None else stop)] = 0

    def _at(self, slots: Int[Tensor, " batch"], positions: Int[Tensor, "batch position"]) -> tuple[Tensor, Tensor]:
        """Return where positions of slots stand: indices of the second and the third axis of the tensors."""
        return slots[:, None], positions

    def _run(self, tensor: Tensor, slot: int, start: int, stop: int) -> tuple[int | Tensor, slice | Tensor]:
        """Return where some positions of one slot stand, likewise."""
        return slot, slice(start, stop)

    def _everywhere(self, index: tuple[Tensor, Tensor]) -> dict[torch.device, tuple[Tensor, Tensor]]:
        """Return an index on every device that layers run on: one copy for all layers there."""
        here = index[1].device
        return {here: index} | {place: (index[0].to(place), index[1].to(place)) for place in self._places}

    def aim(self, batch: ForwardBatch) -> None:
        """Prepare for a forward: where it writes, and how much of the rows it reads.

        Where looking at slots and lengths is free, runs of consecutive slots are shown without a copy, and a single row
        is written as a slice.
        """
        rows, nodes, width = batch.batch, batch.nodes, batch.topology.width
        look = can_look(batch.lengths)
        self.length = self._needed(batch, look=look)
        self._batch, self._gathered = batch, not look
        everything = (Segment(slice(0, rows), slice(0, self.slots)),)  # all rows, gathered from all slots
        self.segments = segments(tuple(batch.slots.tolist())) if look else everything
        if len(self.segments) == 1:
            self._layers = self._views_of(self.segments[0])
        end = int(batch.lengths) + width if look and rows == 1 else self.positions + 1
        self._start = end - nodes if end <= self.positions else -1
        if self._start < 0:
            # This index holds however the rows are cut into segments.
            self._indices = self._everywhere(self._at(batch.slots, self._written(batch)))

    def aim_together(self, batches: Sequence[ForwardBatch]) -> None:
        """Prepare to write the nodes of several forwards as one row of them, forward by forward, row by row."""
        index = [torch.broadcast_tensors(*self._at(each.slots, self._written(each))) for each in batches]
        rows, cells = (torch.cat([part.flatten() for part in parts])[None] for parts in zip(*index, strict=True))
        self._start, self._indices = -1, self._everywhere((rows, cells))

    def _written(self, batch: ForwardBatch) -> Int[Tensor, "batch node"]:
        """Return the positions that a forward writes to. Padding that would fall off the row's end stays there."""
        width = batch.topology.width
        return (batch.lengths[:, None] + self._cells[width - batch.nodes : width]).clamp(max=self.positions - 1)

    def model_positions(self, batch: ForwardBatch) -> Int[Tensor, "batch node"]:
        """Return the positions that a model is given; others may stand past the last, where embeddings have no row."""
        depth = batch.topology.depth[:, -batch.nodes :]
        return (batch.lengths[:, None] + depth).clamp(max=self.max_length - 1)

    def _needed(self, batch: ForwardBatch, *, look: bool) -> int:
        """Return how many positions of a slot a forward reads."""
        if batch.key_bound is not None:
            return min(batch.key_bound, self.positions)
        longest = int(batch.lengths.max()) + batch.topology.width if look else self.positions
        return min(longest, self.positions)

    def _views_of(self, segment: Segment) -> dict[int, tuple[Tensor, ...]]:
        """Return what every layer stores in a run of slots, ``[slot, kv_head, position, head_dim]``."""
        ends = (segment.slots.start, segment.slots.stop)
        if ends not in self._views:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[ends] = {
                layer: tuple(part[segment.slots].transpose(1, 2) for part in self._parts(layer))
                for layer in self._where
            }
        return self._views[ends]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's new entries, ``[batch, kv_head, node, head_dim]``, where ``aim`` said."""
        new = keys, values
        if self.format is not None:
            (keys, key_scales), (values, value_scales) = self.format.encode(keys), self.format.encode(values)
            new = keys, values, key_scales, value_scales
        if self._start >= 0:
            for kept, each in zip(self._layers[layer], new, strict=True):
                kept.narrow(2, self._start, each.shape[2]).copy_(each)
        else:
            for kept, each in zip(self._parts(layer), new, strict=True):
                # Under autocast, a layer's keys may have another dtype than the model.
                kept[self._indices[kept.device]] = each.to(kept.dtype).transpose(1, 2)

    def write_turned(
        self, layer: int, rotate: Callable[..., tuple[Tensor, Tensor]], query: Tensor, key: Tensor, value: Tensor,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return queries and keys that a kernel turns (``kernels.layers.rotate``), and store keys and values.

        The kernel stores them itself where ``write`` would copy them to a place without changing them.
        """
        destination = None
        if self._start < 0 and self.format is None:
            keys, values = self._parts(layer)
            if (keys.dtype, values.dtype) == (key.dtype, value.dtype):
                destination = Destination(keys, values, *self._indices[keys.device])
        query, key = rotate(query, key, value, *options, destination)
        if destination is None:
            self.write(layer, key, value)
        return query, key

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values that attention may see, ``[batch, kv_head, key, head_dim]``.

        A view if the slots are consecutive, otherwise a copy. Codes are decoded by the first operation that reads them.
        """
        if len(self.segments) > 1:
            several = [[part.narrow(2, 0, self.length) for part in self._views_of(s)[layer]] for s in self.segments]
            return self._shown(layer, [torch.cat(parts) for parts in zip(*several, strict=True)])
        parts = [part.narrow(2, 0, self.length) for part in self._layers[layer]]
        if self._gathered:
            assert self._batch is not None
            parts = [part.index_select(0, self._batch.slots) for part in parts]
        return self._shown(layer, parts)

    def read_segment(self, layer: int, segment: Segment) -> tuple[Tensor, Tensor]:
        """Return views of what attention may see of one of the ``segments``."""
        return self._shown(layer, [part.narrow(2, 0, self.length) for part in self._views_of(segment)[layer]])

    def _shown(self, layer: int, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values that look like tensors of the model's dtype."""
        if self.format is None:
            return parts[0], parts[1]
        dtype = self._dtypes[layer]
        keys, values = (QuantizedTensor(*each, self.format, dtype) for each in zip(parts[:2], parts[2:], strict=True))
        return keys, values

    def stored(self, layer: int) -> Stored:
        """Return all that a layer has stored, in all slots, for a kernel that reads the cache itself."""
        keys, values, *scales = (part.transpose(1, 2) for part in self._parts(layer))
        if self.format is None:
            return Stored(keys, values)
        return Stored(keys.view(self.format.dtype), values.view(self.format.dtype), *(each[..., 0] for each in scales))

    def pages(self, slots: Int[Tensor, " batch"]) -> Int[Tensor, "batch page"]:
        """Return the pages of every slot, in order, for a kernel that reads the cache itself.

        A page is an index along the first axis of what ``stored`` returns, whose third axis is as long as a page. With
        rows, every slot is one page.
        """
        return slots[:, None]

    def cells(self, stored: Tensor, slot: int, positions: slice | Int[Tensor, " key"]) -> Tensor:
        """Return some positions of a slot, ``[kv_head, key, ...]``, of a tensor that ``stored`` has returned."""
        return stored[slot][:, positions]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object):
        """Write, then read: this is what a model's layers call."""
        self.write(layer_idx, key_states, value_states)
        return self.read(layer_idx)

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

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, which a model must not rely on: every row has its own length, and positions and masks are given.

        Models call this before they look at the positions they were given, which is harmless. If a layer calls it, it
        wants to use the length (``length_used``).
        """
        self.length_used |= layer_idx > 0
        return 0

    @property
    def is_initialized(self) -> bool:
        return True

    def commit(
        self,
        slots: Int[Tensor, " batch"],
        lengths: Int[Tensor, " batch"],
        path: Int[Tensor, "batch depth"],
        counts: Int[Tensor, " batch"] | None = None,
    ) -> None:
        """Make the root and an accepted path final, over all layers at once.

        Args:
            slots: Slot of every row.
            lengths: Committed positions of each row; the root is at this position, node j at ``length + j``.
            path: Accepted nodes, root left out, -1 padded; the node of depth d ends at ``length + d``.
            counts: How many tokens become final: the root and the path by default, 0 where nothing was decided.
        """
        if path.shape[1]:
            goal = lengths[:, None] + self._cells[1 : path.shape[1] + 1]
            # Padding moves a position onto itself; length + depth <= (max_length - 1) + max_nodes is inside the row.
            source = torch.where(path >= 0, lengths[:, None] + path, goal)
            goals, sources = self._everywhere(self._at(slots, goal)), self._everywhere(self._at(slots, source))
            for tensor in self.tensors:
                tensor[:, *goals[tensor.device]] = tensor[:, *sources[tensor.device]]
        if self.states is not None:
            self.states.commit(slots, path, 1 + (path >= 0).sum(1) if counts is None else counts)
