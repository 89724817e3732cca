"""From records to the figures of a run: the only place where they are computed."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.results import metrics, timing
from experiments.results.gains import Gain, gain_over
from experiments.results.lossless import DECLARED, EXACT, Divergence, Lossless, Verdict, judge
from experiments.results.noise import Noise, noise_of
from experiments.results.records import PLAIN, Record
from experiments.results.requests.figures import RequestFigures, Terms, request_figures
from experiments.results.statistics import Bootstrap, Interval, mean_of_all, ratio_of_sums
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
    utilization: Utilization | None = None

    @property
    def label(self) -> str:
        """The method's name, with a warning where its output is not the target's, or is so only by its own account."""
        if self.exactness in (None, EXACT):
            return self.method
        return f"{self.method}, {DECLARED}" if self.exactness == DECLARED else f"{self.method} ({self.exactness})"

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
    records: Sequence[Record],
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
        records: Records of all methods, at one or several temperatures.
        planned: Records that every method was to have at every temperature.
        series: Methods times temperatures: each method at one temperature is a series of records.
        baseline: The method that speedups are over.
        bootstrap: Settings of the intervals.
        terms: Limits on latencies and a price; None for neither.
        compared_with: The method that gains are over; None for no gains.
        peaks: What the device does at best (``utilization_of``).
    """
    bootstrap, terms = bootstrap or Bootstrap(), terms or Terms()
    by_series: dict[tuple[float, str], list[Record]] = {}
    for record in records:
        by_series.setdefault((record.temperature, record.method), []).append(record)
    methods = tuple(
        replace(
            _method(own, by_series.get((temperature, baseline), []) if method != baseline else None, bootstrap),
            utilization=utilization_of(own, peaks),
        )
        for (temperature, method), own in by_series.items()
    )
    if compared_with is not None:
        methods = tuple(
            method
            if method.method in (baseline, compared_with)
            else replace(
                method,
                gain=gain_over(
                    by_series[method.temperature, method.method],
                    by_series.get((method.temperature, compared_with), []),
                    bootstrap,
                ),
            )
            for method in methods
        )
    methods = tuple(
        replace(each, requests=request_figures(by_series[each.temperature, each.method], terms, bootstrap))
        for each in methods
    )
    complete = len(methods) == series and all(method.finished + method.failed == planned for method in methods)
    return Summary(
        complete=complete,
        planned=planned,
        confidence=bootstrap.confidence,
        methods=methods,
        noise=noise_of(records, baseline),
    )


def _method(records: list[Record], baseline: list[Record] | None, bootstrap: Bootstrap) -> MethodSummary:
    good = [record for record in records if not record.failed]
    rounds = [step for record in good for step in record.steps()]
    rates = [metrics.distinct_n_gram_rate(record.token_ids) for record in good]
    timed = timing.timed_batches(records, baseline)
    compared = [record for record in good if record.equals_plain is not None]
    categories = sorted({record.category for record in good})
    return MethodSummary(
        method=records[0].method,
        exactness=records[0].exactness,
        temperature=records[0].temperature,
        finished=len(good),
        failed=len(records) - len(good),
        errors=dict(Counter(record.error or "unknown" for record in records if record.failed)),
        tokens=sum(len(record.token_ids) for record in good),
        rounds=len(rounds),
        mean_acceptance_length=metrics.mean_acceptance_length(rounds),
        mean_acceptance_length_interval=_length_interval(good, bootstrap),
        expected_mean_acceptance_length=metrics.expected_mean_acceptance_length(rounds),
        distance_tv=mean_of_all([value for record in good for value in record.distance_tv]),
        distance_tv_interval=_distance_interval(good, bootstrap),
        distance_kl=mean_of_all([value for record in good for value in record.distance_kl]),
        draft_acceptance_rate=metrics.draft_acceptance_rate(rounds),
        proposed_depth_per_round=metrics.proposed_depth_per_round(rounds),
        proposed_nodes_per_round=metrics.proposed_nodes_per_round(rounds),
        acceptance_by_position=metrics.acceptance_by_position(rounds),
        distinct_4_gram_rate=_mean(rate for rate in rates if rate is not None),
        finish_reasons=dict(Counter(record.finish_reason for record in records)),
        timed_prompts=sum(batch.prompts for batch in timed),
        seconds=sum(batch.seconds for batch in timed),
        tokens_per_second=timing.tokens_per_second(timed),
        speedup=timing.speedup(timed) if baseline is not None else None,
        speedup_interval=timing.speedup_interval(timed, bootstrap) if baseline is not None else None,
        stage_seconds=timing.stage_seconds(timed),
        equal_to_plain=sum(bool(record.equals_plain) for record in compared) if compared else None,
        compared_with_plain=len(compared) if compared else None,
        divergences=tuple(Divergence.of(r) for r in compared if r.divergence is not None),
        lossless=judge(records),
        by_category={c: _category(c, records, baseline, bootstrap) for c in categories} if len(categories) > 1 else {},
    )


def _category(
    category: str, records: list[Record], baseline: list[Record] | None, bootstrap: Bootstrap
) -> CategorySummary:
    good = [record for record in records if record.category == category and not record.failed]
    # A batch of several categories belongs to none, so with batches there may be nothing timed here.
    timed = [batch for batch in timing.timed_batches(records, baseline) if batch.categories == {category}]
    return CategorySummary(
        prompts=len(good),
        mean_acceptance_length=metrics.mean_acceptance_length([step for record in good for step in record.steps()]),
        mean_acceptance_length_interval=_length_interval(good, bootstrap),
        tokens_per_second=timing.tokens_per_second(timed),
        speedup=timing.speedup(timed) if baseline is not None else None,
        speedup_interval=timing.speedup_interval(timed, bootstrap) if baseline is not None else None,
    )


def _length_interval(records: list[Record], bootstrap: Bootstrap) -> Interval | None:
    rounds = [len(record.accepted) for record in records]
    emitted = [sum(record.accepted) + len(record.accepted) for record in records]
    return bootstrap.over_prompts(ratio_of_sums, [record.prompt for record in records], [emitted, rounds])


def _distance_interval(records: list[Record], bootstrap: Bootstrap) -> Interval | None:
    known = [record for record in records if record.distance_tv and None not in record.distance_tv]
    total = [sum(value for value in record.distance_tv if value is not None) for record in known]
    rounds = [len(record.distance_tv) for record in known]
    return bootstrap.over_prompts(ratio_of_sums, [record.prompt for record in known], [total, rounds])


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
