"""The timestamps of one request, and what follows from them alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from experiments.results.records import Record


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When things happened to a request, in seconds on one monotonic clock.

    The example of the properties: arrived at 0, admitted at 1, prefilled at 2; 1 token at 3, 3 tokens at 4, 2 tokens
    at 6, which is the end.

    Attributes:
        arrived: It was given to the engine.
        admitted: It took its slot.
        prefilled: Its prompt was in the cache.
        emissions: Moments at which the host saw tokens, and how many, in order; at least one token in each.
        finished: The host saw its last token; None if it never ended well.
    """

    arrived: float
    admitted: float
    prefilled: float
    emissions: tuple[tuple[float, int], ...]
    finished: float | None

    @property
    def tokens(self) -> int:
        """The number N of output tokens: 6 in the example."""
        return sum(count for _, count in self.emissions)

    @property
    def first_token(self) -> float | None:
        """When the first token was there; None without one."""
        return self.emissions[0][0] if self.emissions else None

    @property
    def queue(self) -> float:
        """Seconds in the queue: admitted − arrived, 1 in the example."""
        return self.admitted - self.arrived

    @property
    def ttft(self) -> float | None:
        """Time to first token, the queue included: 3 in the example."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def engine_ttft(self) -> float | None:
        """Time to first token without the queue: 2 in the example."""
        return None if self.first_token is None else self.first_token - self.admitted

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, (finished − first token) / (N − 1): 3 / 5 in the example.

        None with fewer than two tokens: there is no further token then, and 0 would flatter.
        """
        if self.first_token is None or self.finished is None or self.tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.tokens - 1)

    @property
    def e2e(self) -> float | None:
        """Seconds from arrival to end: 6 in the example. With N of at least 2 it is TTFT + (N − 1) · TPOT."""
        return None if self.finished is None else self.finished - self.arrived

    @property
    def chunk_gaps(self) -> tuple[float, ...]:
        """Seconds between deliveries (inter-token latency by chunk), however many tokens each brings: 1, 2."""
        return tuple(after - before for (before, _), (after, _) in pairwise(self.emissions))

    @property
    def token_gaps(self) -> tuple[float, ...]:
        """The same by token: each delivery's gap in equal parts for its tokens: 1/3, 1/3, 1/3, 1, 1.

        The tokens of the first delivery have no gap before them.
        """
        pairs = zip(self.chunk_gaps, self.emissions[1:], strict=True)
        return tuple(gap / count for gap, (_, count) in pairs for _ in range(count))

    @property
    def phases(self) -> dict[str, float]:
        """The seconds of e2e in three parts: queue, prefill, and decode (which is rounds). Empty if it never ended."""
        if self.finished is None:
            return {}
        return {
            "queue": self.queue,
            "prefill": self.prefilled - self.admitted,
            "decode": self.finished - self.prefilled,
        }

    @property
    def in_order(self) -> bool:
        """Whether nothing happened before what must come first; if not, the clock or the code is broken."""
        moments = [self.arrived, self.admitted, self.prefilled, *(moment for moment, _ in self.emissions)]
        moments += [] if self.finished is None else [self.finished]
        return all(before <= after for before, after in pairwise(moments))


def timeline_of(record: Record) -> Timeline | None:
    """Returns the timestamps of a record's request; None where its engine does not tell them."""
    if record.arrived is None or record.admitted is None or record.prefilled is None:
        return None
    return Timeline(
        arrived=record.arrived,
        admitted=record.admitted,
        prefilled=record.prefilled,
        emissions=tuple(zip(record.emitted_at, record.emitted, strict=True)),
        finished=None if record.failed else record.finished,
    )


def timelines_of(records: Sequence[Record]) -> list[Timeline]:
    """Returns the timestamps of all records that have them."""
    return [line for line in map(timeline_of, records) if line is not None]
