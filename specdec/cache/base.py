"""What a KV cache is to the engine, and the part of transformers' ``Cache`` that all of our caches implement."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache as TransformersCache
from transformers.masking_utils import create_causal_mask

from specdec.cache.pages import Placement
from specdec.cache.states import States
from specdec.forward import ForwardBatch
from specdec.kernels import Destination, Stored


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores per position.

    Attributes:
        device: Where the layer runs; None for the device of the cache.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device | None = None

    @property
    def bytes_per_position(self) -> int:
        return (self.key_heads * self.key_dim + self.value_heads * self.value_dim) * self.dtype.itemsize


class UnsupportedError(ValueError):
    """A model asked its cache for something that cannot be rolled back to an accepted path."""


class _LayerStub:
    """What transformers' mask code reads of a layer. Our masks are made before that code runs."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    is_initialized = False  # a cross-attention layer without anything to attend to
    supports_early_init = True
    record_past = False

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class OwnLayout(TransformersCache):
    """A transformers cache without layer objects of its own: only ``update`` and ``update_indexer`` write to it.

    Recurrent layers are given a cache of their own (``specdec.cache.states``) in the place of this one.
    """

    def __init__(self, num_layers: int):
        # Not the parent's: it makes layer objects that keep tensors of their own.
        self.layers = [_LayerStub() for _ in range(num_layers)]
        self.layer_class_to_replicate = None
        self.offloading = False

    def _refuse_state(self, *args: object, **kwargs: object):
        raise UnsupportedError("it keeps a state where the trial of its recurrent layers found none")

    update_conv_state = update_recurrent_state = get_conv_state = get_recurrent_state = _refuse_state
    get_linear_cache = set_linear_cache = _refuse_state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Returns False: models ask to leave out a mask of padding, and we give none."""
        return False


class Segment(NamedTuple):
    """Consecutive rows of a batch whose slots are consecutive, too."""

    rows: slice
    slots: slice


@lru_cache(maxsize=4096)
def segments(slots: tuple[int, ...]) -> tuple[Segment, ...]:
    """Returns the runs of consecutive slots in a batch: in ``(0, 1, 4, 5, 2)`` these are rows 0-1, rows 2-3 and row 4.

    A cache that stores slots side by side can show a run without copying it.
    """
    steps = enumerate(itertools.pairwise(slots), start=1)
    breaks = [0, *(row for row, (before, after) in steps if after != before + 1), len(slots)]
    return tuple(Segment(slice(a, b), slice(slots[a], slots[a] + b - a)) for a, b in itertools.pairwise(breaks))


class Cache(OwnLayout, ABC):
    """Keys and values of all slots.

    A forward is announced with ``aim``; the model's layers then ``write`` what they compute and ``read`` what attention
    may see (transformers calls both together, as ``update``). After a round, ``commit`` moves the accepted path's
    entries to their places.

    Attributes:
        slots: The number of slots.
        max_length: The largest number of committed positions in a slot.
        positions: The number of positions in a slot, including those for the nodes of a tree.
        bytes_per_position: Bytes that one position of one slot takes, over all layers.
        segments: The runs of consecutive slots in the batch of the next forward, if they can be shown without a copy;
            otherwise one run with all rows.
        length_used: Whether a layer has asked how long the cache is. A ragged batch has no answer to that.
        quantized: Whether keys and values are stored in other numbers than the model's.
        states: The states of recurrent layers; None for a model without any.
    """

    slots: int
    max_length: int
    positions: int
    segments: tuple[Segment, ...]
    bytes_per_position: int
    length_used: bool = False
    quantized: bool = False
    states: States | None = None

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All tensors of the cache, each ``[layer, slot, position, ...]``."""

    @abstractmethod
    def place(self, placement: Placement) -> None:
        """Begin a request: let its slot have its pages, and copy the beginning that another slot holds.

        A cache of rows that shares nothing can do without.
        """

    def vacate(self, slot: int) -> None:
        """End a slot's request: whatever is written for this slot now must not reach pages that are others' soon."""
        if self.states is not None:
            self.states.clear(slot)

    @abstractmethod
    def save(self, slot: int, count: int) -> list[Tensor]:
        """Return a slot's first positions as tensors in the host's memory."""

    @abstractmethod
    def load(self, slot: int, saved: Sequence[Tensor]) -> None:
        """Write what ``save`` has returned to the first positions of a slot."""

    @abstractmethod
    def aim(self, batch: ForwardBatch) -> None:
        """Prepare for a forward: where it writes, and what it may read."""

    @abstractmethod
    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's new entries, ``[batch, kv_head, node, head_dim]``."""

    def destination(self, layer: int) -> Destination | None:
        """Returns where ``write`` would copy a layer's new entries; None if it does anything else."""
        return None

    @abstractmethod
    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns all keys and values that attention may see, ``[batch, kv_head, key, head_dim]``."""

    @abstractmethod
    def stored(self, layer: int) -> Stored:
        """Returns all that a layer has stored, in all slots, for a kernel that reads the cache itself."""

    def pages(self, slots: Int[Tensor, " batch"]) -> Int[Tensor, "batch page"]:
        """Returns the pages of every slot, in order, for a kernel that reads the cache itself.

        A page is an index along the first axis of what ``stored`` returns, whose third axis is as long as a page. With
        rows, every slot is one page.
        """
        return slots[:, None]

    def cells(self, stored: Tensor, slot: int, positions: slice | Int[Tensor, " key"]) -> Tensor:
        """Return some positions of a slot, ``[kv_head, key, ...]``, of a tensor that ``stored`` has returned."""
        return stored[slot][:, positions]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0, which a model must not rely on: every row has its own length, and positions and masks are given.

        Models call this before they look at the positions they were given, which is harmless. If a layer calls it, it
        wants to use the length (``length_used``).
        """
        self.length_used |= layer_idx > 0
        return 0

    @property
    def is_initialized(self) -> bool:
        return True

    def read_segment(self, layer: int, segment: Segment) -> tuple[Tensor, Tensor]:
        """Returns the keys and values that attention may see of one of the ``segments``."""
        return self.read(layer)

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
            self.move(slots, lengths, path)
        if self.states is not None:
            self.states.commit(slots, path, 1 + (path >= 0).sum(1) if counts is None else counts)

    @abstractmethod
    def move(
        self, slots: Int[Tensor, " batch"], lengths: Int[Tensor, " batch"], path: Int[Tensor, "batch depth"]
    ) -> None:
        """Move an accepted path's keys and values to their final positions (see ``commit``)."""

    @abstractmethod
    def clear(self, slot: int, *, start: int = 0, stop: int | None = None) -> None:
        """Forget entries that may be NaN, which would leak through masked positions.

        Args:
            stop: The position behind the last one; None for all.
        """

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object):
        """Write, then read: this is what a model's layers call."""
        self.write(layer_idx, key_states, value_states)
        return self.read(layer_idx)


def cache_argument(parameters: Container[str]) -> str:
    """Return the name of the cache among a function's parameters, which is ``cache`` since transformers 5.24."""
    return next((name for name in ("cache", "cache_params") if name in parameters), "past_key_values")


CACHE = cache_argument(signature(create_causal_mask).parameters)
"""The name of the cache among the parameters of transformers' mask functions and attention layers."""


def of_class(cache: OwnLayout, wanted: type) -> OwnLayout:
    """Return a cache that is also of a class of a model's own, which only asks for it and uses nothing of it."""
    if not isinstance(cache, wanted):
        cache.__class__ = _both(type(cache), wanted)
    return cache


@lru_cache(maxsize=64)
def _both(ours: type, wanted: type) -> type:
    return type(ours)(ours.__name__, (ours, wanted), {})
