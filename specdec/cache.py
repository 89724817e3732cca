"""The KV cache: preallocated, ragged, written in tree order, committed along a path in one move.

A slot's row holds its committed prefix, and behind it whatever the last tree forward wrote: nothing at or behind
``length`` is ever read without being written first. One row, prefix of 3, then a root and a tree of two
branches, of which the path 2, 3 is accepted::

    position   0   1   2   3   4   5   6
    before     p0  p1  p2  r   n1  n2  n3
    commit     p0  p1  p2  r   n2  n3  n3      new length 6, the rest is garbage
"""

from dataclasses import dataclass

import psutil
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps per position."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_position(self) -> int:
        return (self.key_heads * self.key_dim + self.value_heads * self.value_dim) * self.dtype.itemsize


class _LayerStub:
    """What transformers' mask code asks a layer for; our masks are made before it is reached."""

    is_sliding = False
    is_compileable = False
    is_initialized = True


class ShapeProbe(Cache):
    """Passes keys and values through and notes their shapes: how a model's cache needs are found out."""

    def __init__(self, num_layers: int):
        self.layers = [_LayerStub() for _ in range(num_layers)]
        self.layer_class_to_replicate = None
        self.offloading = False
        self.shapes: dict[int, LayerShape] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object):
        self.shapes[layer_idx] = LayerShape(
            key_states.shape[1], key_states.shape[3], value_states.shape[1], value_states.shape[3], key_states.dtype
        )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class SlotCache(Cache):
    """Keys and values of all slots and layers.

    Layers of equal shape share two tensors, ``[layer, slot, position, kv_head, head_dim]`` for K and V, so that
    a commit is one gather and one scatter per tensor.

    Args:
        shapes: Of every layer.
        max_batch_size: Slots.
        max_length: Committed positions per slot.
        max_nodes: Further positions, for the nodes of a tree.
        device: Where to put it.

    Raises:
        ValueError: It does not fit into the device's free memory.
    """

    def __init__(
        self, shapes: list[LayerShape], *, max_batch_size: int, max_length: int, max_nodes: int, device: torch.device
    ):
        self.layers = [_LayerStub() for _ in shapes]
        self.layer_class_to_replicate = None
        self.offloading = False
        self.max_batch_size, self.max_length = max_batch_size, max_length
        self.positions = max_length + max_nodes
        self.bytes_per_position = sum(shape.bytes_per_position for shape in shapes)
        needed = self.bytes_per_position * self.positions * max_batch_size
        free = free_memory(device)
        if needed > free:
            raise ValueError(
                f"the KV cache needs {needed / 2**30:.2f} GiB ({max_batch_size} slots x {self.positions} positions x "
                f"{self.bytes_per_position} bytes), but {device} has {free / 2**30:.2f} GiB free: "
                f"lower max_batch_size or max_length"
            )
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._where: list[tuple[int, int]] = [(0, 0)] * len(shapes)
        for group, shape in enumerate(dict.fromkeys(shapes)):
            members = [layer for layer, other in enumerate(shapes) if other == shape]
            for index, layer in enumerate(members):
                self._where[layer] = (group, index)
            size = (len(members), max_batch_size, self.positions)
            # Zeros, not empty: a masked position still enters 0 * value, and garbage could be NaN.
            self.keys.append(torch.zeros(*size, shape.key_heads, shape.key_dim, dtype=shape.dtype, device=device))
            self.values.append(torch.zeros(*size, shape.value_heads, shape.value_dim, dtype=shape.dtype, device=device))
        self._rows = slice(0, 0)
        self._start = -1
        self._index: tuple[Tensor, Tensor] | None = None
        self._length = 0

    def aim(self, rows: slice, positions: Int[Tensor, "batch query"], *, start: int, length: int) -> None:
        """Say where the next forward writes and how much of the rows it reads.

        Args:
            rows: The slots.
            positions: Where each row's new keys and values go.
            start: The first position, where there is one row and its positions are consecutive; else -1.
            length: Positions that attention sees; further ones are in no row's use.
        """
        self._rows, self._start, self._length = rows, start, length
        if start < 0:
            slots = torch.arange(rows.start, rows.stop, device=positions.device)
            self._index = (slots[:, None], positions)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object):
        """Write ``[batch, kv_head, query, head_dim]`` and return views of all that attention may see."""
        group, layer = self._where[layer_idx]
        keys, values = self.keys[group][layer], self.values[group][layer]
        if self._start >= 0:
            stop = self._start + key_states.shape[2]
            row = self._rows.start
            keys[row, self._start : stop] = key_states[0].transpose(0, 1)
            values[row, self._start : stop] = value_states[0].transpose(0, 1)
        else:
            assert self._index is not None
            keys[self._index] = key_states.transpose(1, 2)
            values[self._index] = value_states.transpose(1, 2)
        seen = slice(0, self._length)
        return keys[self._rows, seen].transpose(1, 2), values[self._rows, seen].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def commit(
        self, lengths: Int[Tensor, " batch"], path: Int[Tensor, "batch depth"], *, first_slot: int = 0
    ) -> None:
        """Move an accepted path's keys and values to their final positions, over all layers at once.

        Args:
            lengths: Committed positions of each row; the root is at this position, node j at ``length + j``.
            path: Accepted nodes, root left out, -1 padded; node of depth d ends at ``length + d``.
            first_slot: Slot of row 0.
        """
        batch, depth = path.shape
        if depth == 0:
            return
        goal = lengths[:, None] + torch.arange(1, depth + 1, device=path.device)
        # Padding moves a position onto itself; length + depth <= (max_length - 1) + max_nodes is inside the row.
        source = torch.where(path >= 0, lengths[:, None] + path, goal)
        slots = torch.arange(first_slot, first_slot + batch, device=path.device)[:, None]
        for tensor in (*self.keys, *self.values):
            tensor[:, slots, goal] = tensor[:, slots, source]

    def clear(self, slot: int) -> None:
        """Zero a slot: NaN left behind by a failed request would leak through masked positions."""
        for tensor in (*self.keys, *self.values):
            tensor[:, slot] = 0


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
