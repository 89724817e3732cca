"""What a plan answers: figures of forwards, of drafts, of requests, of memory, and over batches and contexts."""

from dataclasses import dataclass

from specdec.physics.capacity import Memory
from specdec.physics.speculation import BestLength
from specdec.physics.work import StepWork


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A forward, or several: what it moves and computes, and the least time of that.

    Attributes:
        kind: ``"prefill"``, ``"decode"``, ``"draft"`` or ``"verify"``.
        what: What it does, in words.
        batch: Rows.
        work: Bytes and operations.
        seconds: The least time, part by part.
        tokens: Tokens that it emits, over all rows; 0 where it emits none.
        predicted: Its time by measured costs; None without such, and outside of what was measured.
    """

    kind: str
    what: str
    batch: int
    work: StepWork
    seconds: float
    tokens: float = 0.0
    predicted: float | None = None

    @property
    def ratio(self) -> float | None:
        """The predicted time over the least one."""
        return None if self.predicted is None else self.predicted / self.seconds


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """What speculation brings for a batch.

    Attributes:
        batch: Rows.
        best: The draft length that is fastest.
        tokens: Tokens per round and row with it.
        efficiency: Seconds of a plain step over those of the verifying one.
        draft_seconds: Seconds of drafting, per round.
        verify_seconds: Seconds of verifying, per round.
        tokens_per_second: Over all rows.
        bound: The best length by the least times.
    """

    batch: int
    best: BestLength
    tokens: float
    efficiency: float
    draft_seconds: float
    verify_seconds: float
    tokens_per_second: float
    bound: BestLength


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a request takes in a batch whose rows are all alike.

    Attributes:
        batch: Rows.
        prefill_seconds: Of its prompt; None outside of what was measured.
        per_token: Seconds per output token.
        seconds: All of it, if the prefill is known.
        tokens_per_second: Output tokens, over all rows, while they decode.
        price: Of a million output tokens, prefill included; None without a price, or if the prefill is not known.
    """

    batch: int
    prefill_seconds: float | None
    per_token: float
    seconds: float | None
    tokens_per_second: float
    price: float | None

    @property
    def prefill_share(self) -> float | None:
        """The prefill's share of the time."""
        if self.prefill_seconds is None or self.seconds is None:
            return None
        return self.prefill_seconds / self.seconds


@dataclass(frozen=True)
class Room:
    """A batch's memory, and whether there is room for it.

    Attributes:
        batch: Rows.
        memory: What they take.
        fits: Whether that is in the device.
        longest: How long so many slots can be.
    """

    batch: int
    memory: Memory
    fits: bool
    longest: int


@dataclass(frozen=True)
class Map:
    """The best draft for every batch and context.

    Attributes:
        batches: Rows of the grid.
        contexts: Its columns.
        best: The fastest length, by batch and context; None outside of what was measured.
        fits: Whether there is room for so many slots of this length.
        break_even: By context: the largest batch at which a draft of ``Plan.fixed`` tokens is no slower than plain
            decoding; None if it always pays, as far as is known.
        known: By context: whether anything is known about it.
        most: The largest batch that ``break_even`` speaks of.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    best: tuple[tuple[BestLength | None, ...], ...]
    fits: tuple[tuple[bool, ...], ...]
    break_even: tuple[int | None, ...]
    known: tuple[bool, ...]
    most: int
