"""The report of benchmarks: a table of scores beside plain decoding's, and its files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.reporting.cells import lossiness
from experiments.reporting.formats import USUAL, document, publish, write_formats
from experiments.reporting.table import Cell, Table, left
from experiments.results.frame import Figures
from experiments.results.statistics import Interval


def report_accuracy(
    rows: Sequence[Figures],
    out: Path,
    *,
    method: str,
    exactness: str | None,
    length: float | None,
    confidence: float,
    formats: Sequence[str] = USUAL,
    title: str = "",
) -> None:
    """Print and write scores."""
    notes = [f"intervals at {confidence:.0%}, over documents; the difference is paired"]
    if length is not None:
        notes.append(f"{method}: {length:.2f} tokens per round")
    table = accuracy_table(rows, title, Cell(method, emphasis=lossiness(exactness)), notes)
    facts = {"title": title, "method": method, "exactness": exactness, "mean_acceptance_length": length}
    text = document(table, notes)
    publish(
        out,
        "accuracy",
        tables=[table],
        figures={**facts, "confidence": confidence, "rows": rows},
        drawn=lambda: write_formats(
            formats, out, "accuracy", document=text, table=table, figures=lambda: _figures(rows)
        ),
    )


def accuracy_table(rows: Sequence[Figures], title: str, method: Cell, notes: list[str]) -> Table:
    """A row per task and metric."""
    return Table.of(
        rows,
        [
            (left("task"), lambda each: each.task),
            (left("metric", fold=True), lambda each: each.metric),
            (left("method"), lambda each: method),
            ("documents", lambda each: f"{each.documents}"),
            ("plain", lambda each: _score(each.plain, each.plain_interval, sign="")),
            ("score", lambda each: _score(each.accuracy, each.interval, sign="")),
            ("difference", lambda each: _score(each.difference, each.difference_interval, sign="+")),
            ("better;\nworse", lambda each: f"{each.better}; {each.worse}"),
        ],
        title=title,
        notes=notes,
    )


def _score(value: float, bounds: Interval | None, *, sign: str) -> Cell:
    more = () if bounds is None else (f"[{bounds[0]:{sign}.3f}, {bounds[1]:{sign}.3f}]",)
    return Cell(f"{value:{sign}.3f}", more)


def _figures(rows: Sequence[Figures]) -> Any:
    import pandas  # when asked for: it takes a while

    flat: list[dict[str, Any]] = []
    for row in rows:
        values = dict(row)
        for name in ("plain_interval", "interval", "difference_interval"):
            low, high = values.pop(name) or (None, None)
            prefix = name.removesuffix("_interval") if name != "interval" else "accuracy"
            values |= {f"{prefix}_low": low, f"{prefix}_high": high}
        flat.append(values)
    return pandas.DataFrame(flat)
