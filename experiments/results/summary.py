"""From the frame of a run to its figures: the only place where they are computed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.results import metrics, timing
from experiments.results.frame import Frame, Outputs, frame_of, rounds_of
from experiments.results.limits import Terms
from experiments.results.lossless import (
    DECLARED,
    EXACT,
    Divergence,
    Lossless,
    Verdict,
    divergences_of,
    judge,
    promises_exact,
)
from experiments.results.noise import Noise, noise_of
from experiments.results.records import PLAIN
from experiments.results.requests import RequestFigures, request_figures
from experiments.results.statistics import Bootstrap, Interval, mean_of_all, ratio_of_sums
from experiments.results.timing import Entrant, Gain, gain_over, winner
from experiments.results.utilization import Utilization, utilization_of


@dataclass(frozen=True, kw_only=True)
class CategorySummary:
    """A method on one category of prompts."""

    prompts: int
    mean_acceptance_length: float | None
    mean_acceptance_length_interval: Interval | None
    tokens_per_second: float | None
    speedup: float | None
    speedup_interval: Interval | None
    exactness: str | None = None


@dataclass(frozen=True, kw_only=True)
class MethodSummary:
    """One method at one temperature.

    Attributes:
        method: Its name.
        exactness: What its verifier promises; None for plain decoding.
        temperature: The requests' temperature.
        finished: Records without a failure; all figures are of these.
        failed: Failures.
        errors: What happened in them, with how often.
        tokens: Emitted, after cuts.
        rounds: Target forwards, prefill not counted.
        mean_acceptance_length: With its bootstrap interval over prompts, and its expectation given the drafts.
        distance_tv: How far a lossy rule's distribution of a round's first token is from p: the mean total variation
            over rounds, with its interval over prompts. None for an exact rule, or where it is not known.
        distance_kl: The same as the KL distance, in nats; None also where it is infinite in any round.
        draft_acceptance_rate: Accepted tokens over proposed depth.
        proposed_depth_per_round, proposed_nodes_per_round: How much was drafted.
        acceptance_by_position: See ``experiments.results.metrics``.
        distinct_4_gram_rate: Mean over outputs.
        finish_reasons: How often each.
        timed_prompts: Records whose batch was timed without a failure in this method or in plain decoding: speed is
            measured on these alone, for both.
        tokens_per_second: Total tokens over total time.
        speedup: Over plain decoding; None for plain decoding itself.
        stage_seconds: Time of each stage, and ``other``: the rest of the wall time.
        equal_to_plain: Greedy outputs that equal plain decoding's, of ``compared_with_plain``; None if sampled.
        divergences: Where each of the others first differs.
        lossless: The verdict on an exact rule's greedy outputs; None where nothing was to be compared.
        by_category: Where there are several.
        requests: What users felt: latencies, rates, goodput, cost; None where no request ended well.
        gain: Over the method that all are compared with; None if there is none, and for itself.
        best_in: The figures, ``mean_acceptance_length`` or ``speedup``, in which it is the best exact method of the run
            at its temperature, and the paired interval of its lead over the next one leaves out 0.
        utilization: What it made of the device, and how well its rounds were predicted; None where nothing was counted.
    """

    method: str
    exactness: str | None
    temperature: float
    finished: int
    failed: int
    errors: dict[str, int]
    tokens: int
    rounds: int
    mean_acceptance_length: float | None
    mean_acceptance_length_interval: Interval | None
    expected_mean_acceptance_length: float | None
    distance_tv: float | None
    distance_tv_interval: Interval | None
    distance_kl: float | None
    draft_acceptance_rate: float | None
    proposed_depth_per_round: float | None
    proposed_nodes_per_round: float | None
    acceptance_by_position: metrics.AcceptanceByPosition
    distinct_4_gram_rate: float | None
    finish_reasons: dict[str, int]
    timed_prompts: int
    seconds: float
    tokens_per_second: float | None
    speedup: float | None
    speedup_interval: Interval | None
    stage_seconds: dict[str, float]
    equal_to_plain: int | None
    compared_with_plain: int | None
    divergences: tuple[Divergence, ...]
    lossless: Lossless | None
    by_category: dict[str, CategorySummary]
    requests: RequestFigures | None = None
    gain: Gain | None = None
    best_in: tuple[str, ...] = ()
    utilization: Utilization | None = None

    @property
    def label(self) -> str:
        """The method's name, with a warning where its output is not the target's, or is so only by its own account."""
        if self.exactness in (None, EXACT):
            return self.method
        return f"{self.method}, {DECLARED}" if self.exactness == DECLARED else f"{self.method} ({self.exactness})"

    @property
    def competes(self) -> bool:
        """Whether it may be called the best: its rule is exact, and its outputs do not show otherwise."""
        return promises_exact(self.exactness) and not self.not_lossless

    @property
    def not_lossless(self) -> bool:
        """Its greedy outputs differ from plain decoding's by more than the dtype explains, though its rule is exact."""
        return self.lossless is not None and self.lossless.verdict is Verdict.NOT_LOSSLESS


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run.

    Attributes:
        complete: All planned prompts have finished.
        planned: Prompts times samples that were to run with every method (at every temperature), every turn of a
            conversation being a prompt.
        confidence: Level of the intervals.
        methods: The baseline first.
        noise: How far the timings can be trusted; None where nothing was timed.
    """

    complete: bool
    planned: int
    confidence: float
    methods: tuple[MethodSummary, ...]
    noise: Noise | None = None

    @property
    def failed(self) -> int:
        return sum(method.failed for method in self.methods)

    @property
    def not_lossless(self) -> tuple[str, ...]:
        """Names of the methods that are not lossless at some temperature."""
        return tuple(dict.fromkeys(method.method for method in self.methods if method.not_lossless))


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
        bootstrap: Settings of the intervals.
        terms: Limits on latencies and a price; None for neither.
        compared_with: The method that gains are over; None for no gains.
        peaks: What the device does at best (``utilization_of``).
    """
    bootstrap, terms, frame = bootstrap or Bootstrap(), terms or Terms(), frame_of(outputs)
    by_series = series_of(frame)
    methods: list[MethodSummary] = []
    for (temperature, name), own in by_series.items():
        plain = by_series.get((temperature, baseline), frame[:0]) if name != baseline else None
        other = by_series.get((temperature, compared_with)) if compared_with else None
        compared = name not in (baseline, compared_with)
        found = replace(
            _method(own, plain, bootstrap),
            requests=request_figures(own, terms, bootstrap),
            gain=gain_over(own, other, bootstrap) if compared and other is not None else None,
            utilization=utilization_of(own, peaks),
        )
        methods.append(found)
    for figure in ("mean_acceptance_length", "speedup"):
        for temperature in dict.fromkeys(method.temperature for method in methods):
            rivals = [n for n, each in enumerate(methods) if each.temperature == temperature and each.competes]
            plain = by_series.get((temperature, baseline))
            entrants = [entrant(methods[n], figure, by_series[temperature, methods[n].method], plain) for n in rivals]
            best = winner(figure, entrants, bootstrap)
            if best is not None:
                found = methods[rivals[best]]
                methods[rivals[best]] = replace(found, best_in=(*found.best_in, figure))
    return Summary(
        complete=len(methods) == series and all(method.finished + method.failed == planned for method in methods),
        planned=planned,
        confidence=bootstrap.confidence,
        methods=tuple(methods),
        noise=noise_of(frame, baseline),
    )


def series_of(frame: Frame) -> dict[tuple[float, str], Frame]:
    """Return the frames of every method at every temperature, in the order of their first records."""
    return dict(iter(frame.groupby(["temperature", "method"], sort=False)))


def entrant(method: MethodSummary, figure: str, own: Frame | None, plain: Frame | None) -> Entrant:
    """Return a method as it competes for a figure."""
    interval = getattr(method, f"{figure}_interval", None)
    return Entrant(value=getattr(method, figure), interval=interval, own=own, plain=plain)


def running_figures(outputs: Outputs, baseline: str = PLAIN) -> dict[tuple[str, float], dict[str, float]]:
    """The main figures of a run that has not ended, by method and temperature, without intervals.

    A figure that has nothing to be computed from yet is left out. After the last record these are the final figures.
    """
    by_series = series_of(frame_of(outputs))
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
    good, rounds = own[~own.failed], rounds_of(own)
    timed = timing.timed_calls(own, plain)
    rates = [rate for rate in map(metrics.distinct_n_gram_rate, good.token_ids) if rate is not None]
    compared = good[good.equals_plain.notna()]
    distance = mean_of_all(rounds.distance_tv)
    ones = np.ones(len(rounds))
    categories = sorted(set(good.category))
    exactness = own.exactness.iloc[0]
    return MethodSummary(
        method=own.method.iloc[0],
        exactness=exactness,
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
        acceptance_by_position=metrics.acceptance_by_position(rounds),
        distinct_4_gram_rate=sum(rates) / len(rates) if rates else None,
        finish_reasons=dict(Counter(own.finish_reason)),
        timed_prompts=int(timed.requests.sum()),
        seconds=float(timed.seconds.sum()),
        **_speed(timed, bootstrap),
        stage_seconds=timing.stage_seconds(timed),
        equal_to_plain=int(compared.equals_plain.sum()) if len(compared) else None,
        compared_with_plain=len(compared) or None,
        divergences=divergences_of(compared),
        lossless=judge(own),
        by_category={
            category: CategorySummary(
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
    return {
        "mean_acceptance_length": metrics.mean_acceptance_length(rounds),
        "mean_acceptance_length_interval": bootstrap.over_prompts(ratio_of_sums, rounds.prompt, columns),
    }


def _speed(timed: Frame, bootstrap: Bootstrap) -> dict[str, Any]:
    return {
        "tokens_per_second": timing.tokens_per_second(timed),
        "speedup": timing.speedup(timed),
        "speedup_interval": timing.speedup_interval(timed, bootstrap),
    }
