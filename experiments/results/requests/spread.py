"""Percentiles over requests, with bootstrap intervals over prompts."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.results.statistics import Bootstrap, Interval

LEVELS = (50, 90, 95, 99)
_POINTS = 300
"""Values that are looked at between the smallest and the largest for an interval; with fewer distinct ones, all."""
_BLOCK = 250
"""Resamples at a time, which bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a figure is distributed over requests.

    A percentile is a value that occurred: the smallest one that at least so many percent of all values do not exceed.
    Of 1, 2, 3, 4 the median is 2 and the 90th percentile 4. Intervals are None with a single prompt.

    Attributes:
        count: The number of values.
        mean: Their mean.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p50_interval: Interval | None = None
    p90_interval: Interval | None = None
    p95_interval: Interval | None = None
    p99_interval: Interval | None = None


Groups = Mapping[Hashable, Sequence[float]]
"""Values by prompt: what is drawn again together."""


def spreads(figures: Mapping[str, Groups], bootstrap: Bootstrap) -> dict[str, Spread | None]:
    """Returns the distribution of every figure; None of one without any value.

    Turns, samples and gaps of one prompt depend on each other, so prompts are drawn again with all that is theirs, and
    the same prompts for all figures.

    Args:
        figures: Values by prompt, by the name of the figure.
        bootstrap: Settings of the intervals.
    """
    prompts = list(dict.fromkeys(prompt for groups in figures.values() for prompt in groups))
    tables = {name: _Table(groups, prompts) for name, groups in figures.items() if any(groups.values())}
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in tables}
    if len(prompts) > 1:  # one prompt says nothing about the others
        rng = np.random.default_rng(bootstrap.seed)
        for start in range(0, bootstrap.resamples, _BLOCK):
            times = _draw(rng, min(_BLOCK, bootstrap.resamples - start), len(prompts))
            for name, table in tables.items():
                drawn[name].append(table.percentiles(times))
    return {
        name: tables[name].spread(np.concatenate(drawn[name]) if drawn[name] else None, bootstrap.confidence)
        if name in tables
        else None
        for name in figures
    }


def percentile(values: np.ndarray, level: int) -> float:
    """Returns the smallest value that at least ``level`` percent of all values do not exceed."""
    ordered = np.sort(values)
    return float(ordered[-(-level * len(ordered) // 100) - 1])


def _draw(rng: np.random.Generator, resamples: int, prompts: int) -> np.ndarray:
    """How often each prompt occurs in every resample: [resample, prompt]."""
    chosen = rng.integers(prompts, size=(resamples, prompts)) + prompts * np.arange(resamples)[:, None]
    return np.bincount(chosen.ravel(), minlength=resamples * prompts).reshape(resamples, prompts).astype(np.float32)


class _Table:
    """One figure's values, and how many of each prompt's do not exceed each of some points."""

    def __init__(self, groups: Groups, prompts: Sequence[Hashable]):
        own = [np.sort(np.asarray(groups.get(prompt, ()), dtype=np.float64)) for prompt in prompts]
        self.values = np.concatenate(own)
        points = np.unique(self.values)
        if len(points) > _POINTS:  # half of them among the largest tenth, where three of the four percentiles are
            places = np.concatenate([np.linspace(0, 0.9, _POINTS // 2), np.linspace(0.9, 1, _POINTS // 2)])
            points = np.unique(np.quantile(self.values, places, method="inverted_cdf"))
        self._points = points
        self._below = np.array([np.searchsorted(each, points, side="right") for each in own], dtype=np.float32)

    def percentiles(self, times: np.ndarray) -> np.ndarray:
        """The percentiles in resamples: [resample, level]; resamples without a value are left out."""
        below = (times @ self._below).astype(np.float64)
        below = below[below[:, -1] > 0]
        places = [(100 * below < level * below[:, -1:]).sum(1) for level in LEVELS]
        return self._points[np.stack(places, axis=1)]

    def spread(self, drawn: np.ndarray | None, confidence: float) -> Spread:
        found = {f"p{level}": percentile(self.values, level) for level in LEVELS}
        intervals: dict[str, Interval] = {}
        if drawn is not None and len(drawn):
            low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
            intervals = {
                f"p{level}_interval": (float(low[place]), float(high[place])) for place, level in enumerate(LEVELS)
            }
        return Spread(count=len(self.values), mean=float(self.values.mean()), **found, **intervals)  # type: ignore[arg-type]
