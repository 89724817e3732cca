"""States of recurrent layers: one per slot that is final, and one per node of the tree that a slot's row drafts.

Keys and values of rejected nodes are never read again. A state has all tokens in it, so that it can neither be cut
back nor be updated twice: every node starts from its parent's state and leaves one of its own, and ``commit`` makes
that of the last accepted node final. Place 0 of a slot is the final state, place ``1 + j`` that of node j. Since the
root's parent is -1, ``1 + parent`` is where a node starts from, for all nodes.

Where there is no room for that, the layer that runs has states of its nodes alone: an accepted path is run over again
(``Pending``).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.host import can_look
from specdec.memory import NoRoomError, free_memory
from specdec.slot_memory import SlotMemory


class StateKey(NamedTuple):
    """The name of a state.

    Attributes:
        kind: ``"conv"``, ``"recurrent"`` or ``"linear"``, as transformers' caches name them; or ``"attribute"``.
        owner: The layer's index; for an attribute the name of its module.
        which: The number among the layer's states; for an attribute its name.
    """

    kind: str
    owner: int | str
    which: int | str = 0


@dataclass(frozen=True)
class StateShape:
    """One state of one row.

    Attributes:
        device: Where the layer runs; None for the device of the cache.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | None = None

    @property
    def bytes(self) -> int:
        """The bytes of one state."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class States:
    """The states of all slots and of their nodes.

    A slot whose length is 0 has no state yet, which is not a state of zeros: layers then start as they like.

    Args:
        layers: The states that every layer keeps of one row.
        length: The length of a slot, which states do not depend on.
        nodes: The largest number of drafted nodes of a row, the root left out.
        device: Where states are whose layer has no device of its own.
        beside: Bytes that were promised to others on the CPU, which takes memory when it is first written.

    Attributes:
        lengths: The number of tokens in the final state of every slot.
        tensors: The states of slots, ``[state, slot, place, ...]``, those of equal shape together.
        short: Why not all nodes have states; None if they have.
        pending: Accepted paths that are not in the final states, where not all nodes have states; else None.
        bytes_per_state: Bytes of the states of one row, or of one node.

    Raises:
        NoRoomError: They do not fit into a device's free memory.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[StateKey, StateShape]],
        *,
        slots: int,
        length: int,
        nodes: int,
        device: torch.device,
        beside: int = 0,
    ):
        shapes = {key: shape for layer in layers for key, shape in layer.items()}
        self.bytes_per_state = sum(shape.bytes for shape in shapes.values())
        self.short = _short(layers, 2 + nodes, 0, slots, length, device, beside)
        if self.short is not None:
            refused = _short(layers, 2, nodes, slots, length, device, beside)
            if refused is not None:
                raise refused
        places = 2 + (nodes if self.short is None else 0)
        self.tensors: list[Tensor] = []
        self._nodes: list[Tensor] = []  # of the layer that runs
        self._where: dict[StateKey, tuple[int, int, int]] = {}
        with torch.inference_mode(False):
            self.lengths = torch.zeros(slots, dtype=torch.long, device=device)
            self.pending = None if self.short is None else Pending(slots, nodes, device)
            for shape in dict.fromkeys(shapes.values()):
                members = [[key for key, other in layer.items() if other == shape] for layer in layers]
                spots = [(key, spot) for layer in members for spot, key in enumerate(layer)]
                self._where.update({key: (len(self.tensors), index, spot) for index, (key, spot) in enumerate(spots)})
                scratch = (max(map(len, members)) if self.short is not None else 0, slots, nodes)
                for tensors, size in ((self.tensors, (len(spots), slots, places)), (self._nodes, scratch)):
                    place = shape.device or device
                    tensors.append(torch.zeros(*size, *shape.shape, dtype=shape.dtype, device=place))

    @property
    def bytes(self) -> int:
        """The bytes of all states."""
        return sum(tensor.nbytes for tensor in (*self.tensors, *self._nodes))

    def check(self, slots: Int[Tensor, " batch"], lengths: Int[Tensor, " batch"]) -> None:
        """Refuse a forward behind other tokens than those that are in the states.

        A state may not be updated twice with one token. This one comparison finds every such mistake.
        """
        same = (self.lengths[slots] == lengths).all()
        message = "a recurrent layer would see a token twice, or miss one: forwards begin where states end"
        if not can_look(same):
            torch._assert_async(same, message)
        elif not same:
            have = self.lengths[slots].tolist()
            raise ValueError(f"{message} (after {have} tokens, and lengths={lengths.tolist()} was given)")

    def before(
        self, key: StateKey, slots: Int[Tensor, " pair"], places: Int[Tensor, " pair"], *, drafted: bool
    ) -> Tensor:
        """Return copies of states at places of slots, to write to: final ones, the root's, or ``drafted`` nodes'."""
        kept, first = self._kept(key, drafted=drafted)
        return kept[slots.to(kept.device), places.to(kept.device) - first]

    def put(
        self, key: StateKey, slots: Int[Tensor, " pair"], places: Int[Tensor, " pair"], state: Tensor, *, drafted: bool
    ) -> None:
        """Store states at places of slots (see ``before``)."""
        kept, first = self._kept(key, drafted=drafted)
        kept[slots.to(kept.device), places.to(kept.device) - first] = state.to(kept.dtype)

    def _kept(self, key: StateKey, *, drafted: bool) -> tuple[Tensor, int]:
        """Return where states are, ``[slot, place, ...]``, and their first place."""
        stack, index, spot = self._where[key]
        if drafted and self.short is not None:
            return self._nodes[stack][spot], 2
        return self.tensors[stack][index], 0

    def commit(
        self, slots: Int[Tensor, " batch"], path: Int[Tensor, "batch depth"], counts: Int[Tensor, " batch"]
    ) -> None:
        """Make the states of the last accepted nodes final.

        Args:
            path: Accepted nodes, root left out, -1 padded.
            counts: How many tokens become final: the root and the path; 0 where nothing was decided.
        """
        if self.pending is not None:
            self.pending.commit(slots, path, counts)
            path = path[:, :0]  # of the tree, only the root has states
        nodes = torch.nn.functional.pad(path, (1, 0))  # the root first
        place = torch.where(counts > 0, nodes.amax(1) + 1, 0)  # a node stands behind its parent
        for kept in self.tensors:
            index = slots.to(kept.device)
            kept[:, index, 0] = kept[:, index, place.to(kept.device)]
        self.lengths[slots] += counts

    def pretend(self, slots: Int[Tensor, " batch"], lengths: Int[Tensor, " batch"]) -> None:
        """Count as having seen so many tokens, for forwards whose time is taken, and nothing else of them."""
        self.lengths[slots] = lengths

    def clear(self, slot: int) -> None:
        """Forget a slot's states, and all of its nodes'. A NaN would never leave a state by itself."""
        self.lengths[slot] = 0
        if self.pending is not None:
            self.pending.counts[slot] = 0
        for kept in self.tensors:
            kept[:, slot, 0] = 0


def _short(
    layers: Sequence[Mapping[StateKey, StateShape]],
    places: int,
    nodes: int,
    slots: int,
    length: int,
    device: torch.device,
    beside: int,
) -> NoRoomError | None:
    """Return why states do not fit: so many of all layers in every slot, and of one layer for its nodes."""
    for place in {shape.device or device for layer in layers for shape in layer.values()}:
        here = [[each for each in layer.values() if (each.device or device) == place] for layer in layers]
        size = sum(shape.bytes for layer in here for shape in layer)
        most = {shape: max(layer.count(shape) for layer in here) for layer in here for shape in layer}
        at_nodes = sum(count * shape.bytes for shape, count in most.items())
        memory = SlotMemory(per_position=0, per_row=places * size + nodes * at_nodes)
        free = free_memory(place) - (beside if place.type == "cpu" else 0)
        if memory.bytes(rows=slots, length=0) > free:
            which = "of one layer for every node" if nodes else "of which every node has one"
            whose = f"the memory for states of recurrent layers, {which},"
            return NoRoomError(memory, rows=slots, length=length, place=place, free=free, whose=whose)
    return None


class Pending:
    """The accepted path of every slot, as far as it is not in the final states.

    What is kept of a round are the inputs of all recurrent layers, and the root's states; a slot's next forward first
    runs each layer, and nothing else, over the path that was accepted.

    Args:
        nodes: The largest number of drafted nodes of a row, the root left out.

    Attributes:
        counts: The number of nodes of every slot's path.
        path: The nodes, behind which anything may stand.
        inputs: What layers were given at every node of a slot's last tree, ``[slot, node, ...]``, by any name.
    """

    def __init__(self, slots: int, nodes: int, device: torch.device):
        self._nodes = nodes
        self.inputs: dict[Hashable, Tensor] = {}
        self.counts = torch.zeros(slots, dtype=torch.long, device=device)
        self.path = torch.zeros(slots, nodes, dtype=torch.long, device=device)

    def commit(
        self, slots: Int[Tensor, " batch"], path: Int[Tensor, "batch depth"], counts: Int[Tensor, " batch"]
    ) -> None:
        """Note the path of a round, whose root is in the final states."""
        self.path[slots, : path.shape[1]] = path
        self.counts[slots] = ((path >= 0) & (counts[:, None] > 0)).sum(1)

    def keep(self, name: Hashable, slots: Int[Tensor, " batch"], inputs: Tensor) -> None:
        """Keep what a layer is given at the nodes of some rows."""
        if name not in self.inputs:
            with torch.inference_mode(False):
                shape = len(self.counts), 1 + self._nodes, *inputs.shape[2:]
                self.inputs[name] = torch.zeros(shape, dtype=inputs.dtype, device=inputs.device)
        self.inputs[name][slots.to(inputs.device), : inputs.shape[1]] = inputs


class StateView:
    """Stands for the cache in one call of one recurrent layer, and notes the new states.

    Layers change the states that they get, or hand new ones back.

    Args:
        before: Copies of the states before the call's tokens; None if nothing came before.

    Attributes:
        now: The states, the new ones as soon as there are some.
    """

    def __init__(self, before: Mapping[StateKey, Tensor] | None):
        self._fresh = before is None
        self.now = dict(before or {})
        self.layers = _LayersOf(self)

    def state(self, key: StateKey) -> Tensor | None:
        """Return a state before the call's tokens; None if nothing came before."""
        return None if self._fresh else self.now[key]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state(StateKey("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state(StateKey("recurrent", layer_idx, state_idx))

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.state(StateKey("linear", layer_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not self._fresh

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Append columns to a convolution's state, which keeps the last ones; return all of them."""
        key = StateKey("conv", layer_idx, state_idx)
        before = self.state(key)
        if before is not None:
            full, width = torch.cat([before, conv_states], dim=-1), conv_kernel_size or before.shape[-1]
        else:
            width = conv_kernel_size or conv_states.shape[-1]
            full = torch.nn.functional.pad(conv_states, (max(width - conv_states.shape[-1], 0), 0))
        self.now[key] = full[..., -width:]
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        self.now[StateKey("recurrent", layer_idx, state_idx)] = recurrent_states
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.now[StateKey("linear", layer_idx)] = linear_cache


class _LayersOf:
    """The cache's layers as versions before 5.23 read them: ``layers[layer].conv_states[index]``."""

    def __init__(self, view: StateView):
        self._view = view

    def __getitem__(self, layer: int) -> "_LayerOf":
        return _LayerOf(self._view, layer)


class _LayerOf:
    record_past = False

    def __init__(self, view: StateView, layer: int):
        self.conv_states = _Read(view, "conv", layer)
        self.recurrent_states = _Read(view, "recurrent", layer)


class _Read(NamedTuple):
    view: StateView
    kind: str
    layer: int

    def __getitem__(self, index: int) -> Tensor | None:  # type: ignore[override]
        return self.view.state(StateKey(self.kind, self.layer, index))
