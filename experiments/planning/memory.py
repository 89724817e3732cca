"""What memory a run will take, before anything of it is loaded, and whether there is so much."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce

from specdec.engine.slot_table import row_sizes, spare_slots
from specdec.physics.capacity import Memory, Served, largest, weight_bytes
from specdec.slot_memory import remedy, written_bytes


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """The memory of a run: an engine for each method, on one target or on several, all at the same time.

    It can say what would fit, as ``specdec.physics.capacity.Room`` asks for it.

    Attributes:
        methods: What each method's engine serves, by its name.
        weights_of: What tells the targets of methods apart, by name; empty where all have the same weights.
        own_rows: Slots of those methods' engines that have a number of their own.
        padded: Methods whose engines may have a slot more, for rows that belong to no request.
        free: Bytes that the device has left.
        copies: Bytes of copies of the weights that this device multiplies faster. They are left out where memory is
            short, so that they are not needed.
        unknown: Methods of whose drafter nothing is known, so that it is not counted.
        is_sure: Whether the sizes of this type of model have been compared with transformers' own.
    """

    target: str
    methods: Mapping[str, Served]
    rows: int
    length: int
    free: float
    place: str
    copies: float = 0.0
    unknown: tuple[str, ...] = ()
    is_sure: bool = True
    weights_of: Mapping[str, str] = field(default_factory=dict)
    own_rows: Mapping[str, int] = field(default_factory=dict)
    padded: frozenset[str] = frozenset()

    def memory(self, *, rows: int, length: int) -> Memory:
        """Return what the run takes with slots of this number and length, copies left out."""
        parts = {}
        for name, served in self.methods.items():
            own = self.own_rows.get(name, rows)
            more = spare_slots(row_sizes(own)) if name in self.padded else 0
            parts[name] = served.memory(rows=own + more, length=length)
        targets = {self.weights_of.get(name, ""): part.weights for name, part in parts.items()}
        return replace(
            reduce(_sum, parts.values()),
            weights=sum(targets.values()),
            activations=max(part.activations for part in parts.values()),  # engines take turns
        )

    @property
    def planned(self) -> Memory:
        """What the run takes."""
        return self.memory(rows=self.rows, length=self.length)

    def most_rows(self, memory: float, *, length: int) -> int:
        """Return how many slots of a length fit; 0 if none does."""
        return largest(lambda rows: self.memory(rows=rows, length=length).total <= memory)

    def longest(self, memory: float, *, rows: int) -> int:
        """Return how long so many slots can be; 0 if there is no room."""
        return largest(lambda length: self.memory(rows=rows, length=length).total <= memory)

    def check(self) -> None:
        """Refuse a run that cannot fit."""
        memory = self.planned
        if memory.total <= self.free or not self.is_sure:
            return
        named = [("weights", memory.weights), ("drafter", memory.drafter)]
        named += [("KV cache", memory.kv + memory.drafter_kv + memory.scratch), ("activations", memory.activations)]
        parts = ", ".join(f"{what} {written_bytes(size)}" for what, size in named if size)
        raise ValueError(
            f"this run needs {written_bytes(memory.total)} ({parts}), and {self.place} has "
            f"{written_bytes(self.free)} free: {self._remedy(memory)}"
        )

    def _remedy(self, memory: Memory) -> str:
        if memory.weights + memory.drafter >= self.free:
            smaller = [name for name in ("int8", "int4") if self._in_fewer_bits(name) < self.free]
            fewer = f"target.quantization={' or '.join(smaller)}, or " if smaller else ""
            return f"its weights alone do not fit; give {fewer}a smaller target"
        return remedy(self, self.free, rows=self.rows, length=self.length, least=2, within="engine.")

    def _in_fewer_bits(self, scheme: str) -> float:
        """Return the bytes of the weights if they were quantized."""
        served = next(iter(self.methods.values()))
        bits = {"int8": 1.0, "int4": 0.53125}[scheme]
        if served.precision.weights <= bits:
            return float("inf")
        return weight_bytes(served.shape, replace(served.precision, weights=bits, output=bits))


def _sum(one: Memory, other: Memory) -> Memory:
    return Memory(**{each.name: getattr(one, each.name) + getattr(other, each.name) for each in fields(Memory)})
