"""A run's results as flat numbers and rows, as trackers take them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from experiments.results import metrics
from experiments.results.records import Record
from experiments.results.summary import MethodSummary, Summary


def flat_figures(summary: Summary) -> dict[str, float]:
    """All single numbers of a summary, by a name such as ``model/T=0/speedup``."""
    flat: dict[str, float] = {"complete": float(summary.complete), "planned": summary.planned}
    for method in summary.methods:
        prefix = f"{method.method}/T={method.temperature:g}"
        flat |= {f"{prefix}/{name}": value for name, value in _numbers(method).items()}
    return flat


def _numbers(method: MethodSummary) -> dict[str, float]:
    flat: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}/{key}", inner)
        elif isinstance(value, tuple | list):
            names = ("low", "high") if name.endswith("_interval") else [str(i + 1) for i in range(len(value))]
            for key, inner in zip(names, value, strict=True):
                add(f"{name}/{key}", inner)
        elif isinstance(value, int | float):
            flat[name] = value

    for name, value in asdict(method).items():
        if name not in ("errors", "divergences"):
            add(name, value)
    return flat


def prompt_table(records: Sequence[Record]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a table with one row per record."""
    columns = ["prompt", "turn", "category", "sample", "method", "exactness", "temperature"]
    columns += ["prompt_tokens", "tokens", "batch_seconds", "rounds", "mean_acceptance_length"]
    columns += ["finish_reason", "equals_plain", "divergence", "margin", "error", "text"]
    rows = [
        [
            *(record.prompt, record.turn, record.category, record.sample),
            *(record.method, record.exactness, record.temperature),
            *(record.prompt_tokens, len(record.token_ids), record.seconds),
            *(len(record.accepted), metrics.mean_acceptance_length(record.steps()), record.finish_reason),
            *(record.equals_plain, record.divergence, record.margin, record.error, record.text),
        ]
        for record in records
    ]
    return columns, rows
