"""How much memory a cache in slots takes, and what fits where it does not. It needs no PyTorch."""

from dataclasses import dataclass


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
        """Return how many slots of a length there is room for; 0 if there is none."""
        return max(0, int(memory // self.bytes(rows=1, length=length)))

    def longest(self, memory: float, *, rows: int) -> int:
        """Return how long so many slots can be; 0 if there is no room."""
        if not self.per_position:  # states alone, which have no length
            return 0
        return max(0, int((memory / rows - self._fixed) // self.per_position))


def remedy(room: SlotMemory, memory: float, *, rows: int, length: int, least: int = 1) -> str:
    """Return in words what to give instead of sizes that do not fit: fewer rows, shorter ones, or neither helps."""
    fewer, shorter = room.most_rows(memory, length=length), room.longest(memory, rows=rows)
    ways = [f"max_batch_size={fewer} with max_length={length}"] if fewer else []
    ways += [f"max_length={shorter} with max_batch_size={rows}"] if shorter >= least else []
    if not ways and rows > 1 and (shorter := room.longest(memory, rows=1)) >= least:
        ways = [f"max_batch_size=1 with max_length={shorter}"]
    return f"give at most {' or '.join(ways)}" if ways else "there is no room for a single request"


def written_bytes(size: float) -> str:
    """Return a number of bytes as text: ``"1.50 GiB"``, ``"300 MiB"``."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
