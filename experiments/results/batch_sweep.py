"""The same prompts at several batch sizes: latency against throughput, its knee, and where speculation stops paying."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from experiments.results.comparison import make_rows
from experiments.results.records import PLAIN
from experiments.results.runs import Run
from experiments.results.statistics import Interval
from experiments.results.summary import MethodSummary

SETTING = "engine.max_batch_size"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A method at one batch size.

    Attributes:
        batch: Requests that run together at most.
        method: All of its figures.
        tokens_per_second: Output tokens of all users.
        tpot: Time per further token of one user, the median over requests, in seconds.
    """

    batch: int
    method: MethodSummary
    tokens_per_second: float
    tpot: float

    @property
    def speedup(self) -> float | None:
        """Over plain decoding at the same batch size."""
        return self.method.speedup

    @property
    def speedup_interval(self) -> Interval | None:
        """Its interval over prompts."""
        return self.method.speedup_interval

    @property
    def power(self) -> float:
        """Throughput over latency (Kleinrock 1979): largest where more load begins to cost more than it brings."""
        return self.tokens_per_second / self.tpot


@dataclass(frozen=True)
class Crossing:
    """Where speculation stops to be faster than plain decoding, or begins to be.

    Attributes:
        before, after: The batch sizes between which it lies.
        at: The batch size at which the speedup is 1, on a straight line over the logarithm of the batch size.
        stops: Whether speculation is faster below and slower above; False: the other way round.
        certain: Whether the intervals of both sides leave out 1.
    """

    before: int
    after: int
    at: float
    stops: bool
    certain: bool


@dataclass(frozen=True)
class Curve:
    """A method at several batch sizes.

    Attributes:
        name: The method, with the settings in which the runs differ besides.
        temperature: The requests' temperature.
        points: By batch size.
    """

    name: str
    temperature: float
    points: tuple[Point, ...]

    @property
    def plain(self) -> bool:
        """Whether it is plain decoding's."""
        return self.name == PLAIN

    @property
    def knee(self) -> Point:
        """The point of the largest ratio of throughput to latency; of equal ones, the smallest batch."""
        return max(self.points, key=lambda point: (point.power, -point.batch))

    @property
    def knee_is_inside(self) -> bool:
        """Whether larger batches were tried than the knee's: at the last one, the curve may still rise."""
        return self.knee.batch != self.points[-1].batch

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """Where the speedup over plain decoding passes 1."""
        known = [(point.batch, point.speedup, point.speedup_interval) for point in self.points if point.speedup]
        found = []
        for (below, first, first_interval), (above, second, second_interval) in pairwise(known):
            if (first > 1) == (second > 1):
                continue
            share = (first - 1) / (first - second)
            at = math.exp(math.log(below) + share * (math.log(above) - math.log(below)))
            certain = _leaves_out_one(first_interval) and _leaves_out_one(second_interval)
            found.append(Crossing(below, above, at, first > 1, certain))
        return tuple(found)


def curves(runs: Sequence[Run]) -> list[Curve]:
    """Return a curve per method and temperature, plain decoding's first; those with a single batch size are left out.

    Where several runs have one batch size, each has measured plain decoding: the first one's is taken.
    """
    points: dict[tuple[float, str], dict[int, Point]] = {}
    for row in make_rows(runs):
        batch = int(row.run.manifest["config"]["engine"]["max_batch_size"])
        others = [part for part in row.name[1:] if not part.startswith(f"{SETTING}=")]
        entries = [(", ".join([row.name[0], *others]), row.method)]
        if row.plain is not None and row.plain is not row.method:
            entries.insert(0, (PLAIN, row.plain))
        for name, method in entries:
            point = _point(batch, method)
            if point is not None:
                points.setdefault((method.temperature, name), {}).setdefault(batch, point)
    made = [
        Curve(name, temperature, tuple(own[batch] for batch in sorted(own)))
        for (temperature, name), own in points.items()
        if len(own) > 1
    ]
    return sorted(made, key=lambda curve: (curve.temperature, not curve.plain))


def _point(batch: int, method: MethodSummary) -> Point | None:
    """A method's point; None where the time per token is not known."""
    found = method.requests
    if found is None or found.tpot is None or not found.tpot.p50 or found.output_tokens_per_second is None:
        return None
    return Point(batch=batch, method=method, tokens_per_second=found.output_tokens_per_second, tpot=found.tpot.p50)


def _leaves_out_one(interval: Interval | None) -> bool:
    return interval is not None and not interval[0] <= 1 <= interval[1]
