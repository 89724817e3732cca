"""How many requests were in flight, over time; and Little's law, which tells broken timestamps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.results.requests.timeline import Timeline

TOLERANCE = 0.01
"""The largest share by which the two sides of Little's law may differ: the clocks are read at different moments."""

PARTS = 60
"""Equal parts of a run's time for which the requests in flight are kept."""

Curve = list[tuple[float, int]]
"""Moments from which on so many requests were there."""


@dataclass(frozen=True, kw_only=True)
class Concurrency:
    """Requests in flight, as averages over time.

    Attributes:
        running: Requests in slots.
        waiting: Requests in the queue.
        expected: What Little's law expects of both together: requests per second times the mean time that one is there.
        seconds: The time of all calls, one after another.
        running_over_time: Requests in slots, averages over equal parts of that time.
        waiting_over_time: Requests in the queue likewise.
    """

    running: float
    waiting: float
    expected: float
    seconds: float = 0.0
    running_over_time: tuple[float, ...] = ()
    waiting_over_time: tuple[float, ...] = ()

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
    calls = [(lines, seconds) for lines, seconds in calls if lines]
    running = [(curve([(line.admitted, line.finished or 0.0) for line in lines]), seconds) for lines, seconds in calls]
    waiting = [(curve([(line.arrived, line.admitted) for line in lines]), seconds) for lines, seconds in calls]
    there = sum(line.e2e or 0.0 for lines, _ in calls for line in lines)
    in_slots, in_queue = _over_time(running), _over_time(waiting)
    return Concurrency(
        running=sum(in_slots) / PARTS,
        waiting=sum(in_queue) / PARTS,
        expected=there / total,
        seconds=total,
        running_over_time=tuple(round(each, 4) for each in in_slots),
        waiting_over_time=tuple(round(each, 4) for each in in_queue),
    )


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


def _over_time(calls: Sequence[tuple[Curve, float]]) -> list[float]:
    """Returns the average of curves over equal parts of the calls' time; what lies outside of a call is missing."""
    moments, areas, begin = [0.0], [0.0], 0.0
    for steps, seconds in calls:
        ends = [moment for moment, _ in steps[1:]] + [seconds]
        for (start, count), end in zip(steps, ends, strict=False):
            low, high = min(max(start, 0.0), seconds), min(max(end, 0.0), seconds)
            moments += [begin + low, begin + high]
            areas += [areas[-1], areas[-1] + count * max(0.0, high - low)]
        begin += seconds
        moments.append(begin)
        areas.append(areas[-1])
    edges = np.linspace(0.0, begin, PARTS + 1)
    return (np.diff(np.interp(edges, moments, areas)) / (begin / PARTS)).tolist()
