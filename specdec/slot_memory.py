"""How much memory a cache in slots takes, and what fits where it does not. It needs no PyTorch."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class Room(Protocol):
    """Whatever can say how many rows, or how long ones, fit into a memory."""

    def most_rows(self, memory: float, *, length: int) -> int:
        """Return how many slots of a length there is room for; 0 if there is none."""
        ...

    def longest(self, memory: float, *, rows: int) -> int:
        """Return how long so many slots can be; 0 if there is no room."""
        ...


@dataclass(frozen=True, kw_only=True)
class SlotMemory:
    """A cache in slots, all of one length, in bytes: what an engine allocates before its first request.

    Attributes:
        drafted: Positions of a row beyond its length, for the nodes of a draft.
        per_row: Bytes of a row however long it is.
        per_node: Bytes of a node of a draft besides those of its position.
    """

    per_position: float
    drafted: int = 0
    per_row: float = 0.0
    per_node: float = 0.0

    def bytes(self, *, rows: int, length: int) -> float:
        """Return what so many rows of this length take."""
        return rows * (self._fixed + length * self.per_position)

    @property
    def _fixed(self) -> float:
        """Bytes of a row without committed positions."""
        return self.per_row + self.drafted * (self.per_node + self.per_position)

    def beside(self, other: "SlotMemory") -> "SlotMemory":
        """Return both caches as one, if every row has a slot in each."""
        per_position = self.per_position + other.per_position
        drafted = min(self.drafted, other.drafted)
        per_row = self._fixed + other._fixed - drafted * per_position
        return SlotMemory(per_position=per_position, drafted=drafted, per_row=per_row)

    def most_rows(self, memory: float, *, length: int) -> int:
        """See ``Room.most_rows``."""
        return max(0, int(memory // self.bytes(rows=1, length=length)))

    def longest(self, memory: float, *, rows: int) -> int:
        """See ``Room.longest``."""
        if not self.per_position:  # states alone, which have no length
            return 0
        return max(0, int((memory / rows - self._fixed) // self.per_position))


def remedy(room: Room, memory: float, *, rows: int, length: int, least: int = 1, within: str = "") -> str:
    """Return in words what to give instead of sizes that do not fit: fewer rows, shorter ones, or neither helps.

    ``least`` is the least length that makes sense, ``within`` stands before the names of the two settings.
    """
    size, longest = f"{within}max_batch_size", f"{within}max_length"
    fewer, shorter = room.most_rows(memory, length=length), room.longest(memory, rows=rows)
    ways = [f"{size}={fewer} with {longest}={length}"] if fewer else []
    ways += [f"{longest}={shorter} with {size}={rows}"] if shorter >= least else []
    if not ways and rows > 1 and (shorter := room.longest(memory, rows=1)) >= least:
        ways = [f"{size}=1 with {longest}={shorter}"]
    return f"give at most {' or '.join(ways)}" if ways else "there is no room for a single request"


def written_bytes(size: float) -> str:
    """Return a number of bytes as text: ``"1.50 GiB"``, ``"300 MiB"``."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
