"""How much memory a model with its cache takes, and how many rows, or how long ones, a device has room for."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from specdec.physics.precision import Precision
from specdec.physics.shape import ModelShape
from specdec.slot_memory import SlotMemory, written_bytes

PROGRAM = 0.6e9
"""Bytes of Python, PyTorch, transformers and what a run imports, as a process on Linux held them."""


def weight_bytes(shape: ModelShape, precision: Precision) -> float:
    """Return the bytes of a model's matrices. A tied output layer in another format than the table is a second one."""
    shared = shape.borrowed or (shape.tied and precision.output == precision.tables)
    output = 0.0 if shared else shape.output_weights * precision.output
    layers = shape.dense_weights * precision.weights + shape.expert_weights * precision.of_experts
    return layers + shape.table_weights * precision.tables + output


def kv_bytes_per_position(shape: ModelShape, precision: Precision) -> float:
    """Return the bytes that one position of one row takes in the cache, over all layers."""
    return sum(count * precision.kept(part) for layer, count in shape.groups for part in layer.attending)


def state_bytes_per_row(shape: ModelShape, precision: Precision) -> float:
    """Return the bytes of recurrent layers' states, for one row or one node of its tree. Matrices are in float32."""
    parts = [(layer.recurrence, count) for layer, count in shape.groups if layer.recurrence is not None]
    sizes = ((4.0 * part.matrix + (part.state - part.matrix) * precision.activations) * count for part, count in parts)
    return sum(sizes)


def activation_bytes(shape: ModelShape, precision: Precision, *, tokens: int, logits: int) -> float:
    """Return the largest part of what a forward of so many tokens, over all rows, holds besides, as an estimate.

    In a layer these are the residual stream, its normed copy and the widest products; at the end, the logits.
    """
    # An MLP's inner vectors and their gates are two of its three matrices' widths.
    inner = [layer.mlp.active / shape.hidden * 2 / 3 for layer, _ in shape.groups]
    attention = [layer.attention for layer, _ in shape.groups if layer.attention is not None]
    # Queries, keys, values and the output.
    mixed = [each.heads * (each.prefill_key_dim + each.prefill_value_dim) + each.kept for each in attention]
    layer = tokens * (2 * shape.hidden + max((*inner, *mixed), default=0.0)) * precision.activations
    return max(layer, logits * shape.vocab * (precision.logits + precision.activations))


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """A model that drafts for another one, whose cache has ``shown`` more positions for nodes."""

    shape: ModelShape
    precision: Precision
    shown: int
    weights: float | None = None

    @property
    def weight_bytes(self) -> float:
        return weight_bytes(self.shape, self.precision) if self.weights is None else self.weights

    @property
    def slots(self) -> SlotMemory:
        """Its cache. In recurrent layers the last token is a node, too."""
        state, keys = (of(self.shape, self.precision) for of in (state_bytes_per_row, kv_bytes_per_position))
        return SlotMemory(per_position=keys, drafted=self.shown, per_row=3 * state, per_node=state)


@dataclass(frozen=True, kw_only=True)
class Served:
    """A target, and all models that draft for it, as they are to be served.

    Attributes:
        activations: Bytes that forwards need besides; None for an estimate.
        overhead: Bytes of everything else: the device's context, graphs, fragmentation.
        packed: They run on a processor: products read copies of 16- and 32-bit weights, and the program counts.
    """

    shape: ModelShape
    precision: Precision
    drafting: tuple[Drafting, ...] = ()
    drafted: int = 0
    prefill_chunk: int = 512
    activations: float | None = None
    overhead: float = 0.0
    packed: bool = False

    def memory(self, *, rows: int, length: int) -> "Memory":
        """Return what rows of at most ``length`` committed positions take, each in a slot of its own."""
        slots = [self.slots, *(each.slots for each in self.drafting)]
        kept, *drafting = (replace(slot, drafted=0).bytes(rows=rows, length=length) for slot in slots)
        held = sum(slot.bytes(rows=rows, length=length) for slot in slots)
        activations, nodes = self.activations, rows * (self.drafted + 1)
        if activations is None:
            tokens = max(self.prefill_chunk, nodes)
            activations = activation_bytes(self.shape, self.precision, tokens=tokens, logits=nodes)
        models = [(self.shape, self.precision), *((each.shape, each.precision) for each in self.drafting)]
        sizes = [(n, b) for s, p in models for n, b in ((s.dense_weights, p.weights), (s.output_weights, p.output))]
        copies = sum(count * size for count, size in sizes if size >= 2)
        return Memory(
            weights=weight_bytes(self.shape, self.precision),
            drafter=sum(each.weight_bytes for each in self.drafting),
            kv=kept,
            drafter_kv=sum(drafting),
            scratch=held - kept - sum(drafting),
            activations=activations,
            overhead=self.overhead + (copies + PROGRAM if self.packed else 0.0),
        )

    @property
    def slots(self) -> SlotMemory:
        """The target's cache. Recurrent layers have a state of every row, of its root, and of every drafted node."""
        state, keys = (of(self.shape, self.precision) for of in (state_bytes_per_row, kv_bytes_per_position))
        return SlotMemory(per_position=keys, drafted=self.drafted, per_row=2 * state, per_node=state)

    def most_rows(self, memory: float, *, length: int) -> int:
        """Return how many slots of a length there is room for in so many bytes; 0 if there is none."""
        return largest(lambda rows: self.memory(rows=rows, length=length).total <= memory)

    def refusal(self, free: float, *, rows: int, length: int, int4: "Served") -> str | None:
        """Return why slots of a length do not fit into so many bytes, and what would; None if they do."""
        need, less = self.memory(rows=rows, length=length), int4.memory(rows=rows, length=length).total
        parts = need.total, need.weights, need.drafter, need.kv + need.drafter_kv, free
        ways = [f"target.quantization=int4 ({written_bytes(less)})"] if less <= free else []
        ways += [f"engine.max_length={longest}"] if (longest := self.longest(free, rows=rows)) > 1 else []
        said = "{} are needed (target {}, drafter {}, caches {}), and {} are free".format(*map(written_bytes, parts))
        return None if need.total <= free else f"{said}; give {' or '.join(ways) or 'a smaller model'}"

    def longest(self, memory: float, *, rows: int) -> int:
        """Return how long so many slots can be in so many bytes; 0 if there is no room."""
        return largest(lambda length: self.memory(rows=rows, length=length).total <= memory)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by what they are for; ``scratch`` is for the nodes of drafts in both caches."""

    weights: float
    drafter: float = 0.0
    kv: float = 0.0
    drafter_kv: float = 0.0
    scratch: float = 0.0
    activations: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))


def largest(fits: Callable[[int], bool], most: int = 1 << 40) -> int:
    """Return the largest number below ``most`` that fits, if all smaller ones do; 0 if not even 1 does."""
    return bisect_left(range(1, most), True, key=lambda number: not fits(number))
