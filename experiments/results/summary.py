"""From the frame of a run to its figures: the only place where they are computed."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.results import metrics, timing
from experiments.results.frame import Figures, Frame, Outputs, frame_of, rounds_of
from experiments.results.limits import Terms
from experiments.results.lossless import DECLARED, EXACT, Verdict, divergences_of, judge, promises_exact
from experiments.results.noise import noise_of
from experiments.results.records import PLAIN
from experiments.results.requests import request_figures
from experiments.results.statistics import Bootstrap, mean_of_all, ratio_of_sums
from experiments.results.timing import gain_over, winner
from experiments.results.utilization import utilization_of

SCHEMA = 3
"""Of ``summary.json``: changes with the names or the meaning of figures."""

Summary = Figures
"""A run's figures, see ``summarize``; ``summary.json`` has the same."""
MethodSummary = Figures
"""One method's figures at one temperature, or on one category of prompts."""


def summarize(
    outputs: Outputs,
    *,
    planned: int,
    series: int = 2,
    baseline: str = PLAIN,
    bootstrap: Bootstrap | None = None,
    terms: Terms | None = None,
    compared_with: str | None = None,
    peaks: Mapping[str, float] | None = None,
) -> Summary:
    """All figures of a run, from its records alone.

    Args:
        outputs: Records of all methods, at one or several temperatures, or their frame.
        planned: Records that every method was to have at every temperature.
        series: Methods times temperatures: each method at one temperature is a series of records.
        baseline: The method that speedups are over.
        terms: Limits on latencies and a price; None for neither.
        compared_with: The method that gains are over; None for no gains.
        peaks: What the device does at best (``utilization_of``).

    Returns:
        ``complete`` (all planned prompts have finished), ``planned``, ``confidence`` (the level of the intervals),
        ``width`` (the wanted one),
        ``methods`` (see ``_method``; the baseline first), ``noise`` (``noise_of``), ``failed`` records, and the names
        of the methods that are ``not_lossless`` at some temperature. Of every method ``best_in`` has the figures
        (``mean_acceptance_length``, ``speedup``) in which it is the best exact method of the run at its temperature.
    """
    bootstrap, terms, frame = bootstrap or Bootstrap(), terms or Terms(), frame_of(outputs)
    by_series = _series_of(frame)
    methods: list[MethodSummary] = []
    for (temperature, name), own in by_series.items():
        plain = by_series.get((temperature, baseline), frame[:0]) if name != baseline else None
        other = by_series.get((temperature, compared_with or "")) if name not in (baseline, compared_with) else None
        more = {
            "requests": request_figures(own, terms, bootstrap),
            "gain": None if other is None else gain_over(own, other, bootstrap),
            "best_in": [],
            "utilization": utilization_of(own, peaks),
        }
        methods.append(_method(own, plain, bootstrap) | more)
    for figure in ("mean_acceptance_length", "speedup"):
        for temperature in {method.temperature for method in methods}:
            rivals = [each for each in methods if each.temperature == temperature and each.competes]
            plain = by_series.get((temperature, baseline))
            entrants = [(each, by_series[temperature, each.method], plain) for each in rivals]
            best = winner(figure, entrants, bootstrap)
            if best is not None:
                rivals[best].best_in.append(figure)
    return Figures(
        schema=SCHEMA,
        complete=len(methods) == series and all(method.finished + method.failed == planned for method in methods),
        planned=planned,
        confidence=bootstrap.confidence,
        width=bootstrap.width,
        methods=methods,
        noise=noise_of(frame, baseline),
        failed=sum(method.failed for method in methods),
        not_lossless=list(dict.fromkeys(method.method for method in methods if method.not_lossless)),
    )


def _series_of(frame: Frame) -> dict[tuple[float, str], Frame]:
    """The frames of every method at every temperature, in the order of their first records."""
    return dict(iter(frame.groupby(["temperature", "method"], sort=False)))


def running_figures(outputs: Outputs, baseline: str = PLAIN) -> dict[tuple[str, float], dict[str, float]]:
    """The main figures of a run that has not ended, by method and temperature, without intervals.

    A figure that has nothing to be computed from yet is left out. After the last record these are the final figures.
    """
    by_series = _series_of(frame_of(outputs))
    found: dict[tuple[str, float], dict[str, float]] = {}
    for (temperature, method), own in by_series.items():
        rounds = rounds_of(own)
        plain = None if method == baseline else by_series.get((temperature, baseline), own[:0])
        timed = timing.timed_calls(own, plain)
        figures = {
            "mean_acceptance_length": metrics.mean_acceptance_length(rounds),
            "draft_acceptance_rate": metrics.draft_acceptance_rate(rounds),
            "tokens_per_second": timing.tokens_per_second(timed),
            "speedup": timing.speedup(timed),
        }
        found[method, temperature] = {name: value for name, value in figures.items() if value is not None}
    return found


def _method(own: Frame, plain: Frame | None, bootstrap: Bootstrap) -> MethodSummary:
    """Return the figures of one method at one temperature. All but ``failed`` and ``errors`` are of what did not fail.

    ``label`` is its name with a warning where its output is not the target's, or is so only by its own account;
    ``competes`` says whether it may be called the best, because its rule is exact and its outputs do not show
    otherwise; ``not_lossless``, that they do. ``rounds`` are target forwards without prefill, ``tokens`` are counted
    after cuts. ``distance_tv`` and ``distance_kl``: how far a lossy rule's distribution of a round's first token is
    from p, as a mean over rounds. Speed is measured on the ``timed_prompts`` alone: records whose batch was timed
    without a failure in this method or in plain decoding. Of ``compared_with_plain`` greedy outputs ``equal_to_plain``
    are equal, and ``divergences`` has the others. ``by_category`` where there are several.
    """
    good, rounds, exactness = own[~own.failed], rounds_of(own), own.exactness.iloc[0]
    name, verdict = own.method.iloc[0], judge(own)
    timed = timing.timed_calls(own, plain)
    rates = [rate for rate in map(metrics.distinct_n_gram_rate, good.token_ids) if rate is not None]
    compared = good[good.equals_plain.notna()]
    distance, ones = mean_of_all(rounds.distance_tv), np.ones(len(rounds))
    categories = sorted(set(good.category))
    declared = f"{name}, {DECLARED}" if exactness == DECLARED else f"{name} ({exactness})"
    not_lossless = verdict is not None and verdict.verdict is Verdict.NOT_LOSSLESS
    return Figures(
        method=name,
        label=name if exactness in (None, EXACT) else declared,
        exactness=exactness,
        competes=promises_exact(exactness) and not not_lossless,
        not_lossless=not_lossless,
        temperature=float(own.temperature.iloc[0]),
        finished=len(good),
        failed=len(own) - len(good),
        errors=dict(Counter(error or "unknown" for error in own.error[own.failed])),
        tokens=int(good.tokens.sum()),
        rounds=len(rounds),
        **_acceptance(rounds, bootstrap),
        expected_mean_acceptance_length=metrics.expected_mean_acceptance_length(rounds),
        distance_tv=distance,
        distance_tv_interval=None
        if distance is None
        else bootstrap.over_prompts(ratio_of_sums, rounds.prompt, [rounds.distance_tv, ones]),
        distance_kl=mean_of_all(rounds.distance_kl),
        draft_acceptance_rate=metrics.draft_acceptance_rate(rounds),
        proposed_depth_per_round=metrics.proposed_per_round(rounds.proposed_depth),
        proposed_nodes_per_round=metrics.proposed_per_round(rounds.proposed_nodes),
        distinct_4_gram_rate=sum(rates) / len(rates) if rates else None,
        finish_reasons=dict(Counter(own.finish_reason)),
        timed_prompts=int(timed.requests.sum()),
        seconds=float(timed.seconds.sum()),
        **_speed(timed, bootstrap),
        stage_seconds=timing.stage_seconds(timed),
        equal_to_plain=int(compared.equals_plain.sum()) if len(compared) else None,
        compared_with_plain=len(compared) or None,
        divergences=divergences_of(compared),
        lossless=verdict,
        by_category={
            category: Figures(
                exactness=exactness,
                prompts=int((good.category == category).sum()),
                **_acceptance(rounds[rounds.category == category], bootstrap),
                # A batch of several categories belongs to none, so with batches there may be nothing timed here.
                **_speed(timed[timed.categories == frozenset([category])], bootstrap),
            )
            for category in (categories if len(categories) > 1 else [])
        },
    )


def _acceptance(rounds: Frame, bootstrap: Bootstrap) -> dict[str, Any]:
    columns = [1 + rounds.accepted, np.ones(len(rounds))]
    interval = bootstrap.over_prompts(ratio_of_sums, rounds.prompt, columns)
    return {
        "mean_acceptance_length": metrics.mean_acceptance_length(rounds),
        "mean_acceptance_length_interval": interval,
        "prompts_needed": bootstrap.prompts_needed(interval, rounds.prompt.nunique()),
        "acceptance_by_position": metrics.acceptance_by_position(rounds, bootstrap),
    }


def _speed(timed: Frame, bootstrap: Bootstrap) -> dict[str, Any]:
    return {
        "tokens_per_second": timing.tokens_per_second(timed),
        "speedup": timing.speedup(timed),
        "speedup_interval": timing.speedup_interval(timed, bootstrap),
    }
