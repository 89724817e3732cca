"""The slot cache in one byte per number: codes in one slot cache, their factors in another.

An entry is quantized once, when it is written, and from then on only moved. Attention always reads stored entries, also
those of the forward's own nodes. So a token that was verified in a tree leaves the entry that it would have left in
plain decoding, and both follow one distribution: that of the model with a quantized cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from specdec.cache.base import Cache, LayerShape, Segment
from specdec.cache.formats import Format, check_device
from specdec.cache.paged_cache import cache_of
from specdec.cache.pages import Paging, Placement
from specdec.cache.slot_cache import check_memory
from specdec.forward import ForwardBatch
from specdec.kernels import Stored


class QuantizedSlotCache(Cache):
    """Keys and values of all slots and layers in a format of one byte per number.

    It is two slot caches that are always told the same. One has the codes, in the layers' shapes; the other has one
    float32 factor per layer, slot, position and head. The keys of indexers are kept as they are.

    Args:
        format: How numbers are stored.
        paging: The size and the number of pages; None for rows. All other arguments: see ``SlotCache``.

    Raises:
        ValueError: The device cannot compute the format, or the cache does not fit into its free memory.
    """

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        format: Format,
        paging: Paging | None = None,
        *,
        max_batch_size: int,
        max_length: int,
        max_nodes: int,
        device: torch.device,
        indexers: Mapping[int, LayerShape] | None = None,
    ):
        super().__init__(max(shapes, default=-1) + 1)
        check_device(format, device)
        self.format, self.quantized = format, True
        self.slots, self.max_length, self.positions = max_batch_size, max_length, max_length + max_nodes
        codes = {layer: replace(shape, dtype=torch.int8) for layer, shape in shapes.items()}
        scales = {layer: replace(shape, key_dim=1, value_dim=1, dtype=torch.float32) for layer, shape in shapes.items()}
        kept = [*codes.values(), *scales.values(), *(indexers or {}).values()]
        self.bytes_per_position = sum(shape.bytes_per_position for shape in kept)
        if paging is None or paging.page_size is None:
            check_memory(kept, max_batch_size, max_length, max_nodes, device)
        sizes = {"max_batch_size": max_batch_size, "max_length": max_length, "max_nodes": max_nodes, "device": device}
        self._codes = cache_of(codes, paging, indexers=indexers, **sizes)
        self._scales = cache_of(scales, paging, **sizes)
        self._parts = (self._codes, self._scales)
        self._dtypes = {layer: shape.dtype for layer, shape in shapes.items()}
        self.segments: tuple[Segment, ...] = ()

    def place(self, placement: Placement) -> None:
        for part in self._parts:
            part.place(placement)

    def vacate(self, slot: int) -> None:
        super().vacate(slot)
        for part in self._parts:
            part.vacate(slot)

    def save(self, slot: int, count: int) -> list[Tensor]:
        return [saved for part in self._parts for saved in part.save(slot, count)]

    def load(self, slot: int, saved: Sequence[Tensor]) -> None:
        codes = len(self._codes.tensors)
        self._codes.load(slot, saved[:codes])
        self._scales.load(slot, saved[codes:])

    def pages(self, slots: Int[Tensor, " batch"]) -> Int[Tensor, "batch page"]:
        return self._codes.pages(slots)

    def cells(self, stored: Tensor, slot: int, positions: slice | Int[Tensor, " key"]) -> Tensor:
        return self._codes.cells(stored, slot, positions)

    def aim(self, batch: ForwardBatch) -> None:
        for part in self._parts:
            part.aim(batch)
        self.segments = self._codes.segments

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Quantize and store ``[batch, kv_head, node, head_dim]`` where ``aim`` said."""
        (key_codes, key_scales), (value_codes, value_scales) = self.format.encode(keys), self.format.encode(values)
        self._codes.write(layer, key_codes, value_codes)
        self._scales.write(layer, key_scales, value_scales)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns all that attention may see; it is decoded by the first operation that reads it."""
        return self._quantized(layer, self._codes.read(layer), self._scales.read(layer))

    def read_segment(self, layer: int, segment: Segment) -> tuple[Tensor, Tensor]:
        """Returns the keys and values that attention may see of one run of slots, likewise."""
        return self._quantized(
            layer, self._codes.read_segment(layer, segment), self._scales.read_segment(layer, segment)
        )

    def _quantized(
        self, layer: int, codes: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        dtype = self._dtypes[layer]
        keys, values = (QuantizedTensor(*each, self.format, dtype) for each in zip(codes, scales, strict=True))
        return keys, values

    def stored(self, layer: int) -> Stored:
        codes, scales = self._codes.stored(layer), self._scales.stored(layer)
        dtype = self.format.dtype
        return Stored(codes.keys.view(dtype), codes.values.view(dtype), scales.keys[..., 0], scales.values[..., 0])

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Write ``[batch, node, dim]`` and return all that the indexer may choose from."""
        return self._codes.update_indexer(indexer_key_states, layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._codes.get_mask_sizes(query_length, layer_idx)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the cache, each ``[layer, slot, position, ...]``."""
        return [*self._codes.tensors, *self._scales.tensors]

    def move(
        self, slots: Int[Tensor, " batch"], lengths: Int[Tensor, " batch"], path: Int[Tensor, "batch depth"]
    ) -> None:
        """See ``Cache.move``. Codes and factors are moved as they are."""
        for part in self._parts:
            part.move(slots, lengths, path)

    def clear(self, slot: int, *, start: int = 0, stop: int | None = None) -> None:
        for part in self._parts:
            part.clear(slot, start=start, stop=stop)


class QuantizedTensor(Tensor):
    """Looks like a tensor of the model's dtype, and is decoded by the first operation that reads it.

    So any attention function can read a quantized cache. One that knows this class takes ``codes`` and ``scales``, and
    need never have all numbers in memory. It cannot be written to.

    Attributes:
        codes: Bytes, in the shape of the tensor.
        scales: One float32 factor per vector: the same shape, with 1 for the last axis.
        format: How numbers are stored.
    """

    codes: Tensor
    scales: Tensor
    format: Format

    @staticmethod
    def __new__(cls: Any, codes: Tensor, scales: Tensor, format: Format, dtype: torch.dtype) -> "QuantizedTensor":
        made: Any = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scales, made.format = codes, scales, format
        return made

    def decoded(self) -> Tensor:
        """Returns the numbers, as a plain tensor."""
        return self.format.decode(self.codes, self.scales, self.dtype)

    def __repr__(self, **kwargs: object) -> str:
        return f"QuantizedTensor({tuple(self.shape)}, {self.dtype}, stored in {self.format.name})"

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and isinstance(args[0], QuantizedTensor):
            raise RuntimeError(f"{func} would write to keys or values that are quantized: use kv_cache=None")
        args, kwargs = tree_map_only(QuantizedTensor, QuantizedTensor.decoded, (args, kwargs or {}))
        return func(*args, **kwargs)
