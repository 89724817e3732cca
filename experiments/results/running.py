"""Figures of a run that has not ended: the main ones, without intervals."""

from collections.abc import Sequence

from experiments.results import metrics, timing
from experiments.results.records import PLAIN, Record


def running_figures(records: Sequence[Record], baseline: str = PLAIN) -> dict[tuple[str, float], dict[str, float]]:
    """The main figures so far, by method and temperature, under the names that ``MethodSummary`` has for them.

    A figure that has nothing to be computed from yet is left out. After the last record these are the final figures.
    """
    by_series: dict[tuple[str, float], list[Record]] = {}
    for record in records:
        by_series.setdefault((record.method, record.temperature), []).append(record)
    found: dict[tuple[str, float], dict[str, float]] = {}
    for (method, temperature), own in by_series.items():
        rounds = [step for record in own if not record.failed for step in record.steps()]
        plain = None if method == baseline else by_series.get((baseline, temperature), [])
        timed = timing.timed_batches(own, plain)
        figures: dict[str, float | None] = {
            "mean_acceptance_length": metrics.mean_acceptance_length(rounds),
            "draft_acceptance_rate": metrics.draft_acceptance_rate(rounds),
            "tokens_per_second": timing.tokens_per_second(timed),
            "speedup": timing.speedup(timed) if plain is not None else None,
        }
        found[method, temperature] = {name: value for name, value in figures.items() if value is not None}
    return found
