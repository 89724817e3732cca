"""Uncertainty of a run's figures: bootstrap intervals over prompts.

The prompts are what a run samples from the tasks it stands for, so they are what is resampled; a method and its
baseline are resampled together, because they ran on the same prompts.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

RESAMPLES = 5000

Interval = tuple[float, float]


def ratio_of_sums(numerators: np.ndarray, denominators: np.ndarray, axis: int = -1) -> np.ndarray | np.floating:
    """Total over total: a long prompt counts for as much as it is long."""
    return numerators.sum(axis) / denominators.sum(axis)


def throughput_ratio(
    tokens: np.ndarray,
    seconds: np.ndarray,
    baseline_tokens: np.ndarray,
    baseline_seconds: np.ndarray,
    axis: int = -1,
) -> np.ndarray | np.floating:
    """A method's tokens per second over its baseline's: the speedup."""
    return ratio_of_sums(tokens, seconds, axis) / ratio_of_sums(baseline_tokens, baseline_seconds, axis)


def bootstrap_interval(
    statistic: Callable[..., np.ndarray | np.floating],
    columns: Sequence[ArrayLike],
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """Percentile bootstrap interval of a statistic of paired columns.

    The same resampled rows are taken of every column. None with fewer than two rows: one prompt says nothing of
    the others.

    Args:
        statistic: Takes the columns and an ``axis``, vectorized.
        columns: One value per prompt each, of equal lengths.
        confidence: Level of the interval.
        resamples: How many.
        seed: Of the resampling.
    """
    check_settings(confidence, resamples)
    data = tuple(np.asarray(column, dtype=np.float64) for column in columns)
    if len({len(column) for column in data}) != 1:
        raise ValueError(f"paired columns of different lengths: {[len(column) for column in data]}")
    if len(data[0]) < 2:
        return None
    # BCa would be closer for skewed data, but it is undefined where the statistic cannot vary (all prompts alike).
    result = stats.bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=resamples,
        confidence_level=confidence,
        rng=np.random.default_rng(seed),
        batch=1000,
    )
    low, high = result.confidence_interval
    return float(low), float(high)


def check_settings(confidence: float, resamples: int) -> None:
    """Refuse settings that give no interval.

    Raises:
        ValueError: Names the setting.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: give a level between 0 and 1, such as 0.95")
    if resamples < 100:
        raise ValueError(f"resamples={resamples}: give at least 100")


def speedup_interval(
    tokens: ArrayLike,
    seconds: ArrayLike,
    baseline_tokens: ArrayLike,
    baseline_seconds: ArrayLike,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """Paired bootstrap interval of ``throughput_ratio`` over prompts (or over batches that ran together)."""
    columns = (tokens, seconds, baseline_tokens, baseline_seconds)
    return bootstrap_interval(throughput_ratio, columns, confidence=confidence, resamples=resamples, seed=seed)


def mean_acceptance_length_interval(
    emitted: ArrayLike,
    rounds: ArrayLike,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """Bootstrap interval of tokens emitted (before any cut) per round, over prompts."""
    return bootstrap_interval(ratio_of_sums, (emitted, rounds), confidence=confidence, resamples=resamples, seed=seed)
