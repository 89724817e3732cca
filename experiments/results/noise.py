"""How far a run's timings can be trusted: their spread between batches, and what else the machine was doing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.results.records import Record

SPREAD_LIMIT = 0.15
"""Timings that vary by more than this share between batches are called noisy."""
OTHERS_LIMIT = 0.1
"""The load of other processes is ignored while they use less than this share of the cores."""
BUSY_LIMIT = 0.75
"""It is also ignored while all processes together use less than this share: enough cores are idle."""

_LEAST = 4
"""Batches below which nothing is said about their spread."""
_MOST = 400
"""Batches that are looked at, at most: the time of the slope's estimate grows with their square."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise in a run's timings.

    Attributes:
        spread: How much plain decoding's time per round varies between batches: the standard deviation (estimated from
            the quartiles, so that a single slow batch does not decide) as a share of the median, after what the
            prompts' lengths explain has been taken out. None with fewer than four batches.
        own_cores: Cores that this process used while it was timed, on average; None where the system does not tell.
        other_cores: Cores that all other processes used meanwhile.
        cores: Cores that this process may use.
        noisy: The spread or the load is beyond its limit.
    """

    spread: float | None
    own_cores: float | None
    other_cores: float | None
    cores: int | None
    noisy: bool

    @property
    def is_loaded(self) -> bool:
        """Other processes use so much that this one has to wait for them."""
        if self.other_cores is None or self.own_cores is None or self.cores is None:
            return False
        busy = self.other_cores + self.own_cores
        return self.other_cores > OTHERS_LIMIT * self.cores and busy > BUSY_LIMIT * self.cores

    @property
    def notes(self) -> list[str]:
        """The figures in words, as far as they are known."""
        parts = []
        if self.spread is not None:
            parts.append(f"timings vary by ±{self.spread:.0%} between batches")
        if self.other_cores is not None:
            parts.append(f"other processes used {self.other_cores:.1f} of {self.cores} cores")
        return parts

    @property
    def warning(self) -> str | None:
        """What is wrong with the timings, and what to do; None if nothing is."""
        if not self.noisy:
            return None
        reasons = []
        if self.spread is not None and self.spread > SPREAD_LIMIT:
            reasons.append(
                f"plain decoding's time per round varies by ±{self.spread:.0%} between batches "
                f"(the limit is {SPREAD_LIMIT:.0%})"
            )
        if self.is_loaded:
            reasons.append(f"other processes used {self.other_cores:.1f} of the {self.cores} cores")
        return (
            f"NOISY TIMINGS: {' and '.join(reasons)}. Repeat the run on an idle machine before you rely on its "
            f"tokens/s and speedup; acceptance does not depend on load."
        )


def noise_of(records: Sequence[Record], baseline: str) -> Noise | None:
    """The noise in the timings of a run; None if nothing was timed, or nothing is known about it.

    Args:
        records: The run's records, those of all methods and temperatures.
        baseline: Name of plain decoding.
    """
    timed = [record for record in records if record.seconds is not None and not record.failed]
    spread = _spread([record for record in timed if record.method == baseline])
    # What was timed together has one load: it counts once.
    calls = {(r.method, r.temperature, r.batch, r.turn): r for r in timed if r.load}
    seconds = [record.seconds or 0.0 for record in calls.values()]
    if spread is None and not sum(seconds):
        return None
    found = Noise(
        spread=spread,
        own_cores=_mean([record.load["own"] for record in calls.values()], seconds),
        other_cores=_mean([record.load["others"] for record in calls.values()], seconds),
        cores=max((round(record.load["cores"]) for record in calls.values()), default=None),
        noisy=False,
    )
    return replace(found, noisy=found.is_loaded or (spread is not None and spread > SPREAD_LIMIT))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float | None:
    """The mean over time, at least 0; None without any."""
    if not sum(weights):
        return None
    return max(0.0, sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights))


def _spread(records: Sequence[Record]) -> float | None:
    relative: list[float] = []
    for temperature in sorted({record.temperature for record in records}):
        batches: dict[tuple[int, int], list[Record]] = {}
        for record in records:
            if record.temperature == temperature:
                batches.setdefault((record.batch, record.turn), []).append(record)
        relative += _deviations(list(batches.values()))
    if len(relative) < _LEAST:
        return None
    low, high = np.quantile(relative, [0.25, 0.75])
    return float(0.7413 * (high - low))  # of a normal distribution, this is the standard deviation


def _deviations(batches: Sequence[Sequence[Record]]) -> list[float]:
    """How far each batch's time per round is from what its length explains, as a share of the median."""
    lengths, times = [], []
    for rows in batches[:: -(-len(batches) // _MOST)] if batches else []:
        rounds = max(len(row.accepted) for row in rows)
        if not rounds:
            continue
        # Prefill is one forward of the whole prompt, and no round.
        times.append(((rows[0].seconds or 0.0) - rows[0].stage_seconds.get("prefill", 0.0)) / rounds)
        lengths.append(float(np.mean([row.prompt_tokens + rounds / 2 for row in rows])))
    if len(times) < _LEAST or np.median(times) <= 0:
        return []
    rest = np.array(times) - _slope(np.array(lengths), np.array(times)) * np.array(lengths)
    return list((rest - np.median(rest)) / np.median(times))


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    """The median slope between two points (Theil 1950, Sen 1968), on which outliers have little influence."""
    first, second = np.triu_indices(len(x), k=1)
    across = x[second] - x[first]
    apart = across != 0
    return float(np.median((y[second] - y[first])[apart] / across[apart])) if apart.any() else 0.0
