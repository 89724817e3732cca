"""Uncertainty of a run's figures: bootstrap intervals over prompts, which a run samples from the tasks it stands for.

Rounds, samples and turns of one prompt depend on each other and stay together. Two methods that ran on the same prompts
are resampled together.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas
from numpy.typing import ArrayLike
from scipy import stats

Interval = tuple[float, float]

Statistic = Callable[..., np.ndarray | np.floating]
"""Takes columns of one value per prompt and an ``axis``, vectorized."""


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Percentile bootstrap over prompts, made wider for few of them.

    The prompts that were drawn vary less than those that they stand for, so percentiles of the resamples alone cover
    too little: 85 % for 95 % at five prompts. They are taken further out, to where a normal interval becomes
    Student's (the expanded percentiles of Hesterberg, arXiv 1411.5279). No interval reaches beyond what single prompts
    give, which is too narrow below five.
    """

    confidence: float = 0.95
    resamples: int = 5000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, wanted in (
            ("confidence", 0 < self.confidence < 1, "a level between 0 and 1, such as 0.95"),
            ("resamples", self.resamples >= 100, "at least 100"),
            ("seed", self.seed >= 0, "an integer of at least 0"),
        ):
            if not good:
                raise ValueError(f"bootstrap.{name}={getattr(self, name)}: give {wanted}")

    def intervals(self, statistic: Statistic, columns: Sequence[ArrayLike]) -> list[Interval] | None:
        """The intervals of several statistics of paired columns; None with fewer than two prompts.

        Args:
            statistic: Computes them from the columns: ``[statistic, resample]``, or ``[resample]`` for a single one.
            columns: One value per prompt each. The same prompts are drawn in every column.
        """
        data = tuple(np.asarray(column, dtype=np.float64) for column in columns)
        count = len(data[0])
        if {len(column) for column in data} != {count}:
            raise ValueError(f"paired columns of different lengths: {[len(column) for column in data]}")
        if count < 2:
            return None  # one prompt says nothing about the others
        tail = stats.norm.cdf(-math.sqrt(count / (count - 1)) * stats.t.ppf((1 + self.confidence) / 2, count - 1))
        # BCa would be closer for skewed data, but it is undefined where the statistic cannot vary (all prompts alike).
        settings: Any = {"paired": True, "vectorized": True, "method": "percentile", "batch": 1000}
        settings |= {"n_resamples": self.resamples, "rng": np.random.default_rng(self.seed)}
        found = stats.bootstrap(data, statistic, confidence_level=1 - 2 * float(tail), **settings).confidence_interval
        return list(zip(*(np.atleast_1d(end).tolist() for end in found), strict=True))

    def interval(self, statistic: Statistic, columns: Sequence[ArrayLike]) -> Interval | None:
        """The interval of a single statistic, likewise."""
        return (self.intervals(statistic, columns) or [None])[0]

    def over_tables(self, statistic: Callable[[np.ndarray], np.ndarray], tables: np.ndarray) -> list[Interval] | None:
        """The intervals of several statistics of counts that are added up over prompts; None with fewer than two.

        Args:
            statistic: Computes ``[statistic, resample]`` from the sums ``[resample, count]``.
            tables: Counts of each prompt: ``[prompt, count]``.
        """

        def of_drawn(drawn: np.ndarray, *, axis: int) -> np.ndarray:
            times = [np.bincount(row.astype(int), minlength=len(tables)) for row in np.atleast_2d(drawn)]
            return statistic(np.stack(times) @ tables)

        return self.intervals(of_drawn, [np.arange(len(tables))])

    def over_prompts(
        self, statistic: Statistic, prompts: Sequence[Hashable], columns: Sequence[ArrayLike]
    ) -> Interval | None:
        """The interval of a statistic of sums by prompt, of values that are not one per prompt."""
        codes, order = pandas.factorize(pandas.Series(list(prompts), dtype=object))
        totals = [np.bincount(codes, np.asarray(column, dtype=np.float64), len(order)) for column in columns]
        return self.interval(statistic, totals)


def ratio_of_sums(numerators: np.ndarray, denominators: np.ndarray, *, axis: int = -1) -> np.ndarray | np.floating:
    """Total over total: a long prompt counts for as much as it is long."""
    return numerators.sum(axis) / denominators.sum(axis)


def throughput_ratio(*columns: np.ndarray, axis: int = -1) -> np.ndarray | np.floating:
    """Speedup, from tokens, seconds, the baseline's tokens and its seconds."""
    return ratio_of_sums(*columns[:2], axis=axis) / ratio_of_sums(*columns[2:], axis=axis)


def mean_of_all(values: Sequence[float | None] | pandas.Series) -> float | None:
    """The mean; None if any value is unknown, because a mean over the others would flatter, or if there is none."""
    mean = pandas.Series(list(values), dtype="float64").mean(skipna=False)
    return None if np.isnan(mean) else float(mean)
