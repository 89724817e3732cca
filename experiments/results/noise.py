"""How far a run's timings can be trusted: their spread between batches, and what else the machine was doing."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas
from scipy import stats

from experiments.results.frame import Frame, Outputs, frame_of
from experiments.results.timing import CALL

SPREAD_LIMIT = 0.15
"""Timings that vary by more than this share between batches are called noisy."""
OTHERS_LIMIT, BUSY_LIMIT = 0.1, 0.75
"""The load of other processes is ignored while they use less than the first share of the cores, or all processes
together less than the second: enough cores are idle."""
_LEAST, _MOST = 4, 400
"""Batches below which nothing is said about their spread, and batches that are looked at, at most: the time of the
slope's estimate grows with their square."""


def noise_of(outputs: Outputs, baseline: str) -> dict[str, Any]:
    """The noise in the timings of a run, as columns of its rows.

    Returns:
        ``noise_spread``: how much plain decoding's time per round varies between batches: the standard deviation
        (estimated from the quartiles, so that a single slow batch does not decide) as a share of the median, after what
        the prompts' lengths explain has been taken out; None with fewer than four batches. ``own_cores`` and
        ``other_cores``: those that this process and all others used while it was timed, on average; ``cores``: those
        that it may use; None where the system does not tell. ``noisy``: the spread or the load is beyond its limit;
        None if nothing was timed, or nothing is known about it.
    """
    frame = frame_of(outputs)
    timed = frame[frame.seconds.notna() & ~frame.failed]
    spread = _spread(timed[timed.method == baseline])
    # What was timed together has one load: it counts once.
    calls: Frame = timed[timed.load.map(bool).astype(bool)].drop_duplicates(["method", "temperature", "batch", "turn"])
    load: Frame = pandas.DataFrame(list(calls.load), columns=["own", "others", "cores"])
    own, others = (_mean(load[name], calls.seconds) for name in ("own", "others"))
    noise = {"noise_spread": spread, "own_cores": own, "other_cores": others}
    noise["cores"] = round(load.cores.max()) if len(load) else None
    known = spread is not None or others is not None
    return noise | {"noisy": bool(reasons(noise)) if known else None}


def reasons(noise: Mapping[str, Any]) -> list[str]:
    """Why the timings of a run, by a row of it, are noisy; empty if they are not."""
    spread, own, others, cores = (noise[name] for name in ("noise_spread", "own_cores", "other_cores", "cores"))
    said = []
    if spread is not None and spread > SPREAD_LIMIT:
        said.append(f"plain decoding's time per round varies by ±{spread:.0%} between batches")
    if others is not None and others > OTHERS_LIMIT * cores and own + others > BUSY_LIMIT * cores:
        said.append(f"other processes used {others:.1f} of the {cores:.0f} cores")
    return said


def notes(noise: Mapping[str, Any]) -> list[str]:
    """The spread and the load in words, as far as they are known."""
    spread, others = noise["noise_spread"], noise["other_cores"]
    said = [] if spread is None else [f"timings vary by ±{spread:.0%} between batches"]
    return said + ([] if others is None else [f"other processes used {others:.1f} of {noise['cores']:.0f} cores"])


def _mean(values: pandas.Series, weights: pandas.Series) -> float | None:
    """The mean over time, at least 0; None without any."""
    return max(0.0, float(np.average(values, weights=weights))) if weights.sum() else None


def _spread(plain: Frame) -> float | None:
    relative = np.concatenate([np.zeros(0), *(_deviations(own) for _, own in plain.groupby("temperature"))])
    # Of a normal distribution, this is the standard deviation.
    return float(0.7413 * stats.iqr(relative)) if len(relative) >= _LEAST else None


def _deviations(own: Frame) -> np.ndarray:
    """How far each batch's time per round is from what its length explains, as a share of the median."""
    calls = own.groupby(CALL, sort=False)
    batches = calls[["seconds", "stage_seconds"]].first()
    batches = batches.assign(rounds=calls["rounds"].max(), prompt_tokens=calls["prompt_tokens"].mean())
    batches = batches[:: -(-len(batches) // _MOST)]
    batches = batches[batches.rounds > 0]
    # Prefill is one forward of the whole prompt, and no round.
    prefill = batches.stage_seconds.map(lambda stages: stages.get("prefill", 0.0))
    times = ((batches.seconds - prefill) / batches.rounds).to_numpy(dtype=np.float64)
    lengths = (batches.prompt_tokens + batches.rounds / 2).to_numpy()
    if len(times) < _LEAST or np.median(times) <= 0:
        return np.zeros(0)
    slope = stats.theilslopes(times, lengths)[0] if len(set(lengths)) > 1 else 0.0
    rest = times - slope * lengths
    return (rest - np.median(rest)) / np.median(times)
