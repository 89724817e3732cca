"""Speed: which batches count, and what is computed from their times."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiments.results.records import Record
from experiments.results.statistics import Bootstrap, Interval, throughput_ratio

STAGES = ("ingestion", "prefill", "draft", "verify", "accept", "commit", "completion")
"""Stages in order: what happens to a prompt first, then those of a round as the engine's clock names them (a test
compares the two)."""


@dataclass(frozen=True)
class TimedBatch:
    """A batch that was timed as one: a turn of one prompt, or of as many prompts as the engine has slots.

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


def timed_batches(records: list[Record], baseline: list[Record] | None) -> list[TimedBatch]:
    """The batches that ran without a failure in both; without a baseline, in this one."""
    own = _by_batch(records)
    other = own if baseline is None else _by_batch(baseline)
    ids: dict[int, set[str]] = {}
    for record in records:
        ids.setdefault(record.batch, set()).add(record.prompt)
    return [
        TimedBatch(
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


def speedup(timed: list[TimedBatch]) -> float | None:
    """Tokens per second over the baseline's; None if either has none."""
    own = tokens_per_second(timed)
    plain = _ratio(sum(batch.baseline_tokens for batch in timed), sum(batch.baseline_seconds for batch in timed))
    return own / plain if own is not None and plain else None


def speedup_interval(timed: list[TimedBatch], bootstrap: Bootstrap) -> Interval | None:
    """The speedup's interval. Prompts keep all their samples and turns; what was timed together stays together."""
    ids = [batch.ids for batch in timed]
    columns = [
        [batch.tokens for batch in timed],
        [batch.seconds for batch in timed],
        [batch.baseline_tokens for batch in timed],
        [batch.baseline_seconds for batch in timed],
    ]
    return bootstrap.over_prompts(throughput_ratio, ids, columns)


def tokens_per_second(timed: list[TimedBatch]) -> float | None:
    """Total tokens over total time; None without any."""
    return _ratio(sum(batch.tokens for batch in timed), sum(batch.seconds for batch in timed))


def stage_seconds(timed: list[TimedBatch]) -> dict[str, float]:
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
