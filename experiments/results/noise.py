"""How far a run's timings can be trusted: their spread between batches, and what else the machine was doing."""

from dataclasses import dataclass, replace

import numpy as np
import pandas
from scipy import stats

from experiments.results.frame import Frame, Outputs, frame_of

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


def noise_of(outputs: Outputs, baseline: str) -> Noise | None:
    """The noise in the timings of a run; None if nothing was timed, or nothing is known about it.

    Args:
        outputs: The run's records, those of all methods and temperatures.
        baseline: Name of plain decoding.
    """
    frame = frame_of(outputs)
    timed = frame[frame.seconds.notna() & ~frame.failed]
    spread = _spread(timed[timed.method == baseline])
    # What was timed together has one load: it counts once.
    calls = timed[timed.load.map(bool).astype(bool)].drop_duplicates(["method", "temperature", "batch", "turn"])
    if spread is None and not calls.seconds.sum():
        return None
    load = pandas.DataFrame(list(calls.load), columns=["own", "others", "cores"])
    found = Noise(
        spread=spread,
        own_cores=_mean(load.own, calls.seconds),
        other_cores=_mean(load.others, calls.seconds),
        cores=round(load.cores.max()) if len(load) else None,
        noisy=False,
    )
    return replace(found, noisy=found.is_loaded or (spread is not None and spread > SPREAD_LIMIT))


def _mean(values: pandas.Series, weights: pandas.Series) -> float | None:
    """The mean over time, at least 0; None without any."""
    return max(0.0, float(np.average(values, weights=weights))) if weights.sum() else None


def _spread(plain: Frame) -> float | None:
    relative = [each for _, own in plain.groupby("temperature") for each in _deviations(own)]
    if len(relative) < _LEAST:
        return None
    low, high = np.quantile(relative, [0.25, 0.75])
    return float(0.7413 * (high - low))  # of a normal distribution, this is the standard deviation


def _deviations(own: Frame) -> list[float]:
    """How far each batch's time per round is from what its length explains, as a share of the median."""
    batches = own.groupby(["batch", "turn"], sort=False).agg(
        seconds=("seconds", "first"),
        stages=("stage_seconds", "first"),
        rounds=("rounds", "max"),
        prompt_tokens=("prompt_tokens", "mean"),
    )
    batches = batches[:: -(-len(batches) // _MOST)]
    batches = batches[batches.rounds > 0]
    # Prefill is one forward of the whole prompt, and no round.
    prefill = batches.stages.map(lambda stages: stages.get("prefill", 0.0))
    times = ((batches.seconds - prefill) / batches.rounds).to_numpy(dtype=np.float64)
    lengths = (batches.prompt_tokens + batches.rounds / 2).to_numpy()
    if len(times) < _LEAST or np.median(times) <= 0:
        return []
    slope = stats.theilslopes(times, lengths)[0] if len(set(lengths)) > 1 else 0.0
    rest = times - slope * lengths
    return list((rest - np.median(rest)) / np.median(times))
