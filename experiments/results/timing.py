"""Speed: the calls that count, what follows from their times, paired comparisons of methods, use of the device.

A call is a turn of a batch: what the engine was given together, and what was timed as one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas

from experiments.results.frame import Frame, rounds_of
from experiments.results.statistics import Bootstrap, Interval, ratio_of_sums, throughput_ratio

STAGES = ("ingestion", "prefill", "draft", "verify", "accept", "commit", "completion")
"""Stages in order: what happens to a prompt first, then those of a round as the engine's clock names them (a test
compares the two)."""
CALL = ["batch", "turn"]


def calls_of(own: Frame) -> Frame:
    """Return the calls of one method at one temperature, by batch and turn.

    Returns:
        ``requests``, ``tokens``, ``seconds``, ``failed`` (any request), ``joules``, ``stages``,
        ``categories``, and ``prompts``: those of the batch in all of its turns, which belong together when prompts are
        resampled.
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
    calls = calls_of(own)
    calls = calls[~calls.failed]
    if baseline is None:
        return calls
    others = calls_of(baseline)
    others = others.loc[~others.failed, ["tokens", "seconds"]].add_prefix("baseline_")
    return calls.join(others, how="inner")


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


Entrant = tuple[Mapping[str, Any], Frame | None, Frame | None]
"""A method that may be the best in a figure: its row, its outputs at one temperature, and plain decoding's of the same
run; None for outputs that are not at hand."""


def winner(figure: str, entrants: Sequence[Entrant], bootstrap: Bootstrap) -> int | None:
    """Return the number of the best of several; None where chance may have made it the best.

    The interval of its lead over the next one has to leave out 0. Both are drawn on the same prompts where they have
    some in common; else their own intervals must not overlap.
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
    sides = [_sums(figure, each) for each in (first, second)]
    if sides[0] is None or sides[1] is None:
        return None
    both = sides[0].join(sides[1].add_prefix("other_"), how="inner")
    count, statistic = len(sides[0].columns), throughput_ratio if figure == "speedup" else ratio_of_sums
    if both.empty or not both.sum().all():
        return None

    def difference(*columns: np.ndarray, axis: int = -1) -> np.ndarray | np.floating:
        return statistic(*columns[:count], axis=axis) - statistic(*columns[count:], axis=axis)

    columns: list[Any] = [both[name].to_numpy(dtype=np.float64) for name in both]
    interval = bootstrap.interval(difference, columns)
    ours, theirs = float(statistic(*columns[:count])), float(statistic(*columns[count:]))
    return Lead(ours, theirs, ours - theirs, interval, len(both))


def _sums(figure: str, entrant: Entrant) -> Frame | None:
    """Numerator and denominator of a ratio, by prompt."""
    _, own, plain = entrant
    if own is None or (figure == "speedup" and plain is None):
        return None
    if figure.endswith("acceptance_length"):
        counted = "expected_accepted" if figure.startswith("expected") else "accepted"
        sums = rounds_of(own).groupby("prompt", sort=False)[counted].agg(["sum", "size"])
        return pandas.DataFrame({"emitted": sums["sum"] + sums["size"], "rounds": sums["size"]})
    names = ["tokens", "seconds", *(["baseline_tokens", "baseline_seconds"] if figure == "speedup" else [])]
    timed = timed_calls(own, plain if figure == "speedup" else None)
    return timed.groupby("prompts", sort=False)[names].sum()


def gain_over(own: Frame, other: Frame, bootstrap: Bootstrap) -> Lead | None:
    """The lead of one method's outputs in expected mean acceptance length; None if they share no prompt.

    The expectations are over the acceptance, given the drafts that were made: they have less noise than counted
    tokens, and the same mean.
    """
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
        ``useful_mfu``: operations of the target for tokens that became final, over what the measured peak would have
        done during the verify stage. ``wasted``: the share of verified nodes that brought no token.
    """
    counted = own[~own.failed & own.work.map(bool).astype(bool)]
    if counted.empty:
        return {}
    calls = counted.drop_duplicates(CALL)
    work, seconds = (pandas.DataFrame(list(calls[name])).sum().to_dict() for name in ("work", "stage_seconds"))
    figures: dict[str, Any] = {}
    if peaks is not None:
        for name in MODEL_STAGES:
            figures |= _use_of(name, work, seconds.get(name), peaks)
        if "useful_flops" in work and seconds.get("verify"):
            figures["useful_mfu"] = work["useful_flops"] / (seconds["verify"] * peaks["flops"])
    if work.get("verified"):
        figures["wasted"] = 1 - work.get("committed", 0.0) / work["verified"]
    return figures


def _use_of(name: str, work: Mapping[str, float], time: float | None, peaks: Mapping[str, float]) -> dict[str, Any]:
    moved, flops = work.get(f"{name}_bytes"), work.get(f"{name}_flops")
    if not moved or flops is None or not time:
        return {}
    bandwidth, peak = max(peaks["copy"], peaks["read"]), peaks["flops"]
    return {
        f"mbu.{name}": moved / (time * bandwidth),
        f"mfu.{name}": flops / (time * peak),
        f"of_least.{name}": time / max(moved / bandwidth, flops / peak),
    }
