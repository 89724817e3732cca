"""From records to the figures of a run: the only place where they are computed."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiments.measure import PLAIN
from experiments.records import Record
from specdec import metrics, stats
from specdec.engine.clock import STAGES
from specdec.stats import Interval


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where a greedy output leaves the one of plain decoding."""

    prompt: str
    turn: int = 0
    sample: int
    index: int
    margin: float | None


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
        temperature: Of the requests.
        finished: Records without a failure; all figures are of these.
        failed: Failures.
        errors: What happened in them, with how often.
        tokens: Emitted, after cuts.
        rounds: Target forwards, prefill not counted.
        mean_acceptance_length: And its bootstrap interval over prompts, and its expectation given the drafts.
        divergence_tv: How far the law of a round's first token is from p, of a lossy rule: mean total variation over
            rounds, with its interval over prompts; None for an exact rule, or where it is not known.
        divergence_kl: The same in Kullback-Leibler divergence, nats; None also where it is infinite in any round.
        draft_acceptance_rate: Accepted tokens over proposed depth.
        proposed_depth_per_round, proposed_nodes_per_round: How much was drafted.
        acceptance_by_position: See ``specdec.metrics``.
        distinct_4_gram_rate: Mean over outputs.
        finish_reasons: How often each.
        timed_prompts: Records whose batch was timed without a failure in this method or in plain decoding: speed is
            measured on these alone, for both.
        tokens_per_second: Total tokens over total time.
        speedup: Over plain decoding; None for plain decoding itself.
        stage_seconds: Time of each stage, and ``other``: the rest of the wall time.
        equal_to_plain: Greedy outputs that equal plain decoding's, of ``compared_with_plain``; None if sampled.
        divergences: The others.
        by_category: Where there are several.
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
    divergence_tv: float | None
    divergence_tv_interval: Interval | None
    divergence_kl: float | None
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
    by_category: dict[str, CategorySummary]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run.

    Attributes:
        complete: All planned prompts have finished.
        planned: Prompts times samples that were to run with every method (at every temperature), every turn of a
            conversation being a prompt.
        confidence: Of the intervals.
        methods: The baseline first.
    """

    complete: bool
    planned: int
    confidence: float
    methods: tuple[MethodSummary, ...]

    @property
    def failed(self) -> int:
        return sum(method.failed for method in self.methods)


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Settings of the intervals."""

    confidence: float = 0.95
    resamples: int = stats.RESAMPLES
    seed: int = 0

    def __post_init__(self) -> None:
        stats.check_settings(self.confidence, self.resamples)


def summarize(
    records: Sequence[Record],
    *,
    planned: int,
    groups: int = 2,
    baseline: str = PLAIN,
    bootstrap: Bootstrap | None = None,
) -> Summary:
    """All figures of a run, from its records alone.

    Args:
        records: Of all methods, and of several temperatures perhaps.
        planned: Records that every method was to have at every temperature.
        groups: Methods times temperatures.
        baseline: The method that speedups are over.
        bootstrap: Settings of the intervals.
    """
    bootstrap = bootstrap or Bootstrap()
    grouped: dict[tuple[float, str], list[Record]] = {}
    for record in records:
        grouped.setdefault((record.temperature, record.method), []).append(record)
    methods = tuple(
        _method(group, grouped.get((temperature, baseline), []) if method != baseline else None, bootstrap)
        for (temperature, method), group in grouped.items()
    )
    complete = len(methods) == groups and all(method.finished + method.failed == planned for method in methods)
    return Summary(complete=complete, planned=planned, confidence=bootstrap.confidence, methods=methods)


def _method(records: list[Record], baseline: list[Record] | None, bootstrap: Bootstrap) -> MethodSummary:
    good = [record for record in records if not record.failed]
    rounds = [step for record in good for step in record.steps()]
    rates = [metrics.distinct_n_gram_rate(record.token_ids) for record in good]
    timed = _timed(records, baseline)
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
        divergence_tv=_mean_of_all(value for record in good for value in record.divergence_tv),
        divergence_tv_interval=_divergence_interval(good, bootstrap),
        divergence_kl=_mean_of_all(value for record in good for value in record.divergence_kl),
        draft_acceptance_rate=metrics.draft_acceptance_rate(rounds),
        proposed_depth_per_round=metrics.proposed_depth_per_round(rounds),
        proposed_nodes_per_round=metrics.proposed_nodes_per_round(rounds),
        acceptance_by_position=metrics.acceptance_by_position(rounds),
        distinct_4_gram_rate=_mean(rate for rate in rates if rate is not None),
        finish_reasons=dict(Counter(record.finish_reason for record in records)),
        timed_prompts=sum(batch.prompts for batch in timed),
        seconds=sum(batch.seconds for batch in timed),
        tokens_per_second=_ratio(sum(batch.tokens for batch in timed), sum(batch.seconds for batch in timed)),
        speedup=_speedup(timed) if baseline is not None else None,
        speedup_interval=_speedup_interval(timed, bootstrap) if baseline is not None else None,
        stage_seconds=_stages(timed),
        equal_to_plain=sum(bool(record.equals_plain) for record in compared) if compared else None,
        compared_with_plain=len(compared) if compared else None,
        divergences=tuple(
            Divergence(prompt=r.prompt, turn=r.turn, sample=r.sample, index=r.divergence, margin=r.margin)
            for r in compared
            if r.divergence is not None
        ),
        by_category={c: _category(c, records, baseline, bootstrap) for c in categories} if len(categories) > 1 else {},
    )


def _category(
    category: str, records: list[Record], baseline: list[Record] | None, bootstrap: Bootstrap
) -> CategorySummary:
    good = [record for record in records if record.category == category and not record.failed]
    # A batch of several categories belongs to none, so with batches there may be nothing timed here.
    timed = [batch for batch in _timed(records, baseline) if batch.categories == {category}]
    return CategorySummary(
        prompts=len(good),
        mean_acceptance_length=metrics.mean_acceptance_length([step for record in good for step in record.steps()]),
        mean_acceptance_length_interval=_length_interval(good, bootstrap),
        tokens_per_second=_ratio(sum(batch.tokens for batch in timed), sum(batch.seconds for batch in timed)),
        speedup=_speedup(timed) if baseline is not None else None,
        speedup_interval=_speedup_interval(timed, bootstrap) if baseline is not None else None,
    )


@dataclass(frozen=True)
class _Batch:
    """What was timed as one: a turn of a prompt, or of as many as the engine has slots.

    ``ids`` are the prompts of the batch in all of its turns: what belongs together when prompts are resampled.
    """

    prompts: int
    ids: frozenset[str]
    categories: set[str]
    tokens: int
    seconds: float
    baseline_tokens: int
    baseline_seconds: float
    stages: dict[str, float]


def _timed(records: list[Record], baseline: list[Record] | None) -> list[_Batch]:
    """The batches that ran without a failure in both; without a baseline, in this one."""
    own = _by_batch(records)
    other = own if baseline is None else _by_batch(baseline)
    ids: dict[int, set[str]] = {}
    for record in records:
        ids.setdefault(record.batch, set()).add(record.prompt)
    return [
        _Batch(
            prompts=len(rows),
            ids=frozenset(ids[rows[0].batch]),
            categories={row.category for row in rows},
            tokens=sum(len(row.token_ids) for row in rows),
            seconds=_seconds(rows),
            baseline_tokens=sum(len(row.token_ids) for row in other[batch]),
            baseline_seconds=_seconds(other[batch]),
            stages=dict(rows[0].stage_seconds),
        )
        for batch, rows in own.items()
        if batch in other and not any(row.failed for row in (*rows, *other[batch]))
    ]


def _by_batch(records: Iterable[Record]) -> dict[tuple[int, int], list[Record]]:
    """Records by batch and turn: the unit that was timed."""
    batches: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        batches.setdefault((record.batch, record.turn), []).append(record)
    return batches


def _seconds(rows: Sequence[Record]) -> float:
    """Wall time of a batch, which all of its records carry."""
    assert rows[0].seconds is not None
    return rows[0].seconds


def _speedup(timed: list[_Batch]) -> float | None:
    own = _ratio(sum(batch.tokens for batch in timed), sum(batch.seconds for batch in timed))
    plain = _ratio(sum(batch.baseline_tokens for batch in timed), sum(batch.baseline_seconds for batch in timed))
    return own / plain if own is not None and plain else None


def _speedup_interval(timed: list[_Batch], bootstrap: Bootstrap) -> Interval | None:
    """Resamples prompts with all their samples and turns; what was timed together stays together."""
    clusters: dict[frozenset[str], list[_Batch]] = {}
    for batch in timed:
        clusters.setdefault(batch.ids, []).append(batch)
    return stats.speedup_interval(
        [sum(batch.tokens for batch in cluster) for cluster in clusters.values()],
        [sum(batch.seconds for batch in cluster) for cluster in clusters.values()],
        [sum(batch.baseline_tokens for batch in cluster) for cluster in clusters.values()],
        [sum(batch.baseline_seconds for batch in cluster) for cluster in clusters.values()],
        confidence=bootstrap.confidence,
        resamples=bootstrap.resamples,
        seed=bootstrap.seed,
    )


def _length_interval(records: list[Record], bootstrap: Bootstrap) -> Interval | None:
    """Samples and turns of a prompt are no independent witnesses: prompts are resampled, with all of theirs."""
    totals: dict[str, tuple[int, int]] = {}
    for record in records:
        emitted, rounds = totals.get(record.prompt, (0, 0))
        totals[record.prompt] = (emitted + sum(record.accepted) + len(record.accepted), rounds + len(record.accepted))
    return stats.mean_acceptance_length_interval(
        [emitted for emitted, _ in totals.values()],
        [rounds for _, rounds in totals.values()],
        confidence=bootstrap.confidence,
        resamples=bootstrap.resamples,
        seed=bootstrap.seed,
    )


def _divergence_interval(records: list[Record], bootstrap: Bootstrap) -> Interval | None:
    totals: dict[str, tuple[float, int]] = {}
    for record in records:
        if None in record.divergence_tv or not record.divergence_tv:
            continue
        total, rounds = totals.get(record.prompt, (0.0, 0))
        own = [value for value in record.divergence_tv if value is not None]
        totals[record.prompt] = (total + sum(own), rounds + len(own))
    if not totals:
        return None
    return stats.bootstrap_interval(
        stats.ratio_of_sums,
        ([total for total, _ in totals.values()], [rounds for _, rounds in totals.values()]),
        confidence=bootstrap.confidence,
        resamples=bootstrap.resamples,
        seed=bootstrap.seed,
    )


def _stages(timed: list[_Batch]) -> dict[str, float]:
    """Seconds by stage over all batches; the wall time that no stage has is ``other``."""
    stages = {stage for batch in timed for stage in batch.stages}
    if not stages:
        return {}
    # In the order of a round, which is not the order in which they first occurred.
    ordered = [stage for stage in STAGES if stage in stages] + sorted(stages.difference(STAGES))
    totals = {stage: sum(batch.stages.get(stage, 0.0) for batch in timed) for stage in ordered}
    return totals | {"other": max(0.0, sum(batch.seconds for batch in timed) - sum(totals.values()))}


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def _mean_of_all(values: Iterable[float | None]) -> float | None:
    """None also if one of them is: a mean over the others would flatter."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return sum(known) / len(known) if known and len(known) == len(listed) else None
