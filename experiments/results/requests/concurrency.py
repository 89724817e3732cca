"""How many requests were in flight, over time; and Little's law, which tells broken timestamps."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.results.requests.timeline import Timeline

TOLERANCE = 0.01
"""The largest share by which the two sides of Little's law may differ: the clocks are read at different moments."""

Curve = list[tuple[float, int]]
"""Moments from which on so many requests were there."""


@dataclass(frozen=True, kw_only=True)
class Concurrency:
    """Requests in flight, as averages over time.

    Attributes:
        running: Requests in slots.
        waiting: Requests in the queue.
        expected: What Little's law expects of both together: requests per second times the mean time that one is there.
    """

    running: float
    waiting: float
    expected: float

    @property
    def holds(self) -> bool:
        """Whether Little's law does. It always holds where all that arrived have left, unless timestamps are wrong."""
        return abs(self.running + self.waiting - self.expected) <= TOLERANCE * max(self.expected, 1e-12)


def concurrency(calls: Sequence[tuple[Sequence[Timeline], float]]) -> Concurrency | None:
    """Returns the averages over several calls of an engine; None if nothing is known.

    Args:
        calls: The requests of every call, and how many seconds the call took by its own clock. The requests' moments
            are seconds since it began.
    """
    calls = [([line for line in lines if line.finished is not None], seconds) for lines, seconds in calls]
    total = sum(seconds for lines, seconds in calls if lines)
    if not total:
        return None
    running = waiting = there = 0.0
    for lines, seconds in calls:
        running += _area(curve([(line.admitted, line.finished or 0.0) for line in lines]), seconds)
        waiting += _area(curve([(line.arrived, line.admitted) for line in lines]), seconds)
        there += sum(line.e2e or 0.0 for line in lines)
    return Concurrency(running=running / total, waiting=waiting / total, expected=there / total)


def curve(spans: Sequence[tuple[float, float]]) -> Curve:
    """Returns how many of some spans cover each moment, from the first change on.

    Spans 0 to 2 and 1 to 3: 1 from 0 on, 2 from 1, 1 from 2, 0 from 3.
    """
    changes: dict[float, int] = {}
    for start, end in spans:
        changes[start] = changes.get(start, 0) + 1
        changes[end] = changes.get(end, 0) - 1
    found: Curve = []
    count = 0
    for moment in sorted(changes):
        count += changes[moment]
        found.append((moment, count))
    return found


def _area(steps: Curve, seconds: float) -> float:
    """The integral of a curve between the call's beginning and its end: what lies outside shows as missing."""
    ends = [moment for moment, _ in steps[1:]] + [seconds]
    area = 0.0
    for (start, count), end in zip(steps, ends, strict=False):
        area += count * max(0.0, min(end, seconds) - min(max(start, 0.0), seconds))
    return area
