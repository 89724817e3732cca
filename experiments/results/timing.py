"""Speed: the calls that count, paired comparisons of methods, use of the device, and the noise in the timings.

A call is a turn of a batch: what the engine was given together, and what was timed as one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas
from scipy import stats

from experiments.results.frame import Frame, Outputs, frame_of, rounds_of
from experiments.results.statistics import Bootstrap, Interval, ratio_of_sums, throughput_ratio

STAGES = ("ingestion", "prefill", "draft", "verify", "accept", "commit", "completion")
"""Stages in order: what happens to a prompt first, then those of a round as the engine's clock names them (a test
compares the two)."""
CALL = ["batch", "turn"]


def calls_of(own: Frame) -> Frame:
    """Return the calls of one method at one temperature, by batch and turn; ``failed`` says that any request did.

    ``prompts`` are those of the batch in all of its turns, which belong together when prompts are resampled.
    """
    calls = own.groupby(CALL, sort=False)
    prompts = own.groupby("batch")["prompt"].agg(frozenset)
    return pandas.DataFrame(
        {
            "tokens": calls["tokens"].sum(),
            **{name: calls[name].first() for name in ("seconds", "joules")},
            "stages": calls["stage_seconds"].first(),
            "failed": calls["failed"].any(),
            "requests": calls.size(),
            "categories": calls["category"].agg(frozenset),
        }
    ).assign(prompts=lambda made: prompts.reindex(made.index.get_level_values("batch")).to_numpy())


def timed_calls(own: Frame, baseline: Frame | None) -> Frame:
    """Return the calls without a failure in either method, beside the baseline's tokens and seconds if it is given."""
    calls = calls_of(own)[lambda made: ~made.failed]
    if baseline is None:
        return calls
    others = calls_of(baseline)[lambda made: ~made.failed]
    return calls.join(others[["tokens", "seconds"]].add_prefix("baseline_"), how="inner")


def tokens_per_second(timed: Frame) -> float | None:
    """Total tokens over total time; None without any."""
    return _ratio(timed.tokens.sum(), timed.seconds.sum())


def speedup(timed: Frame) -> float | None:
    """Tokens per second over the baseline's; None without a baseline, or if either has no tokens or no time."""
    if "baseline_tokens" not in timed:
        return None
    own, plain = tokens_per_second(timed), _ratio(timed.baseline_tokens.sum(), timed.baseline_seconds.sum())
    return own / plain if own is not None and plain else None


def speedup_interval(timed: Frame, bootstrap: Bootstrap) -> Interval | None:
    """The speedup's interval. Prompts keep all their samples and turns; what was timed together stays together."""
    if "baseline_tokens" not in timed:
        return None
    columns = [timed[name] for name in ("tokens", "seconds", "baseline_tokens", "baseline_seconds")]
    return bootstrap.over_prompts(throughput_ratio, timed.prompts, columns)


def stage_seconds(timed: Frame) -> dict[str, float]:
    """Seconds by stage over all calls, in the order of a round; the wall time that no stage has is ``other``."""
    found = pandas.DataFrame(list(timed.stages)).sum().to_dict()
    totals = {name: found[name] for name in [*(s for s in STAGES if s in found), *sorted({*found}.difference(STAGES))]}
    return totals and totals | {"other": max(0.0, float(timed.seconds.sum()) - sum(totals.values()))}


class Lead(NamedTuple):
    """The difference of two methods' figures on the ``prompts`` that both have finished, with its paired interval."""

    first: float
    second: float
    difference: float
    interval: Interval | None
    prompts: int


Entrant = tuple[Mapping[str, Any], Frame, Frame | None]
"""A method that may be the best in a figure: its row, its outputs at one temperature, and plain decoding's of the same
run; None where it has no speedup."""


def winner(figure: str, entrants: Sequence[Entrant], bootstrap: Bootstrap) -> int | None:
    """Return the number of the best of several; None where chance may have made it the best.

    The interval of its lead over the next one has to leave out 0; without a common prompt, their own must not overlap.
    """
    known = {number: row[figure] for number, (row, *_) in enumerate(entrants) if row[figure] is not None}
    ranked = sorted(known, key=lambda number: -known[number])
    if len(ranked) < 2:
        return None
    best, second = entrants[ranked[0]], entrants[ranked[1]]
    found = lead(figure, best, second, bootstrap)
    if found is not None:
        return ranked[0] if found.interval is not None and found.interval[0] > 0 else None
    low, high = best[0].get(f"{figure}_low"), second[0].get(f"{figure}_high")
    return ranked[0] if low is not None and high is not None and low > high else None


def lead(figure: str, first: Entrant, second: Entrant, bootstrap: Bootstrap) -> Lead | None:
    """Return the lead of the first method in a figure; None if the two have no prompt in common.

    ``figure`` is ``speedup``, ``tokens_per_second``, ``mean_acceptance_length`` or ``expected_mean_acceptance_length``.
    """
    ours, theirs = (_sums(figure, own, plain) for _, own, plain in (first, second))
    both = ours.join(theirs.add_prefix("other_"), how="inner")
    count, statistic = len(ours.columns), throughput_ratio if figure == "speedup" else ratio_of_sums
    if both.empty or not both.sum().all():
        return None

    def difference(*columns: np.ndarray, axis: int = -1) -> np.ndarray | np.floating:
        return statistic(*columns[:count], axis=axis) - statistic(*columns[count:], axis=axis)

    columns: list[Any] = [both[name].to_numpy(dtype=np.float64) for name in both]
    one, other = float(statistic(*columns[:count])), float(statistic(*columns[count:]))
    return Lead(one, other, one - other, bootstrap.interval(difference, columns), len(both))


def _sums(figure: str, own: Frame, plain: Frame | None) -> Frame:
    """Numerators and denominators of a figure, by prompt."""
    if figure.endswith("acceptance_length"):
        counted = "expected_accepted" if figure.startswith("expected") else "accepted"
        sums = rounds_of(own).groupby("prompt", sort=False)[counted].agg(["sum", "size"])
        return pandas.DataFrame({"emitted": sums["sum"] + sums["size"], "rounds": sums["size"]})
    names = ["tokens", "seconds", *(["baseline_tokens", "baseline_seconds"] if figure == "speedup" else [])]
    timed = timed_calls(own, plain if figure == "speedup" else None)
    return timed.groupby("prompts", sort=False)[names].sum()


def gain_over(own: Frame, other: Frame, bootstrap: Bootstrap) -> Lead | None:
    """The lead of one method's outputs in expected mean acceptance length; None if they share no prompt."""
    return lead("expected_mean_acceptance_length", ({}, own, None), ({}, other, None), bootstrap)


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator / denominator) if denominator else None


# ---------------------------------------------------------------- use of the device

MODEL_STAGES = ("prefill", "draft", "verify")
"""The stages that run a model."""


def utilization_of(own: Frame, peaks: Mapping[str, float] | None) -> dict[str, Any]:
    """Return a method's use of the device as columns of its row; empty where nothing was counted.

    Args:
        own: One method's outputs, at one temperature.
        peaks: The most that was measured on the device: ``copy``, ``read`` and ``flops``. None: unknown.

    Returns:
        By stage (``mbu.verify``), where something is known about it: the shares of the memory's bandwidth (``mbu``) and
        of the operations (``mfu``) against the peaks; ``of_least``, its time over the least one that these allow.
        ``useful_mfu`` counts the target's operations for tokens that became final.
    """
    counted = own[~own.failed & own.work.map(bool).astype(bool)]
    if counted.empty:
        return {}
    calls = counted.drop_duplicates(CALL)
    work, seconds = (pandas.DataFrame(list(calls[name])).sum().to_dict() for name in ("work", "stage_seconds"))
    figures: dict[str, Any] = {}
    if peaks is not None:
        bandwidth, peak = max(peaks["copy"], peaks["read"]), peaks["flops"]
        for name in MODEL_STAGES:
            moved, flops, time = work.get(f"{name}_bytes"), work.get(f"{name}_flops"), seconds.get(name)
            if moved and flops is not None and time:
                figures[f"mbu.{name}"], figures[f"mfu.{name}"] = moved / (time * bandwidth), flops / (time * peak)
                figures[f"of_least.{name}"] = time / max(moved / bandwidth, flops / peak)
        if "useful_flops" in work and seconds.get("verify"):
            figures["useful_mfu"] = work["useful_flops"] / (seconds["verify"] * peak)
    if work.get("verified"):
        figures["wasted"] = 1 - work.get("committed", 0.0) / work["verified"]
    return figures


# ---------------------------------------------------------------- how far timings can be trusted

SPREAD_LIMIT, OTHERS_LIMIT, BUSY_LIMIT = 0.15, 0.1, 0.75
"""Timings that vary by more than the first share between batches are called noisy. The load of other processes is
ignored while they use less than the second share of the cores, or all processes together less than the third."""
_LEAST, _MOST = 4, 400
"""Batches below which nothing is said about their spread, and batches that are looked at, at most: the time of the
slope's estimate grows with their square."""


def noise_of(outputs: Outputs, baseline: str) -> dict[str, Any]:
    """The noise in the timings of a run, as columns of its rows; None for what is not known.

    ``noise_spread`` is how much plain decoding's time per round varies between batches, of which there have to be four:
    the standard deviation (estimated from the quartiles, so that a single slow batch does not decide) as a share of the
    median, after what the prompts' lengths explain has been taken out.
    """
    frame = frame_of(outputs)
    timed = frame[frame.seconds.notna() & ~frame.failed]
    spread = _spread(timed[timed.method == baseline])
    # What was timed together has one load: it counts once.
    calls: Frame = timed[timed.load.map(bool).astype(bool)].drop_duplicates(["method", "temperature", "batch", "turn"])
    load: Frame = pandas.DataFrame(list(calls.load), columns=["own", "others", "cores"])
    means = [load[name].dot(calls.seconds.to_numpy()) / (calls.seconds.sum() or np.nan) for name in ("own", "others")]
    own, others = (None if np.isnan(mean) else max(0.0, float(mean)) for mean in means)
    cores = round(load.cores.max()) if len(load) else 0
    return noise_verdict(spread, own, others, cores)


def noise_verdict(spread: float | None, own: float | None, others: float | None, cores: int) -> dict[str, Any]:
    """The noise by how much times vary, and by the cores that this process and others used, as columns."""
    busy = (others or 0.0) > OTHERS_LIMIT * cores and (own or 0.0) + (others or 0.0) > BUSY_LIMIT * cores
    noisy = None if spread is None and others is None else busy or (spread or 0.0) > SPREAD_LIMIT
    return {"noise_spread": spread, "own_cores": own, "other_cores": others, "cores": cores or None, "noisy": noisy}


def noise_words(noise: Mapping[str, Any], between: str = "batches") -> list[str]:
    """The spread and the load in words, as far as they are known."""
    spread, others = noise["noise_spread"], noise["other_cores"]
    said = [] if spread is None else [f"timings vary by ±{spread:.0%} between {between}"]
    return said + ([] if others is None else [f"other processes used {others:.1f} of {noise['cores']:.0f} cores"])


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
