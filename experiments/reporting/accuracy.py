"""The report of benchmarks: a table of scores beside plain decoding's, and its files."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.grading.accuracy import Accuracy
from experiments.reporting import terminal
from experiments.reporting.cells import lossiness
from experiments.reporting.formats import USUAL, write_formats
from experiments.reporting.table import Cell, Column, Table
from experiments.results.statistics import Interval


def report_accuracy(
    rows: Sequence[Accuracy],
    out: Path,
    *,
    method: str,
    exactness: str | None,
    length: float | None,
    confidence: float,
    formats: Sequence[str] = USUAL,
    title: str = "",
) -> None:
    """Print and write scores.

    Args:
        rows: One per task and metric.
        out: Folder for ``accuracy.json`` and the table.
        method: The method's name.
        exactness: What its rule promises.
        length: Its mean acceptance length; None if nothing was generated.
        confidence: Level of the intervals.
        formats: How the table is written.
        title: Title of the table.
    """
    notes = [f"intervals at {confidence:.0%}, over documents; the difference is paired"]
    if length is not None:
        notes.append(f"{method}: {length:.2f} tokens per round")
    table = accuracy_table(rows, title, Cell(method, emphasis=lossiness(exactness)), notes)
    console = terminal.console()
    console.print(terminal.render(table, terminal.Frame.NARROW))
    out.mkdir(parents=True, exist_ok=True)
    facts = {"title": title, "method": method, "exactness": exactness, "mean_acceptance_length": length}
    contents = {**facts, "confidence": confidence, "rows": [asdict(each) for each in rows]}
    (out / "accuracy.json").write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    text = "\n".join([table.markdown(), *(f"- {note}" for note in notes)]) + "\n"
    written = write_formats(formats, out, "accuracy", document=text, table=table, figures=lambda: _figures(rows))
    terminal.list_written(console, [*written, out / "accuracy.json"])


def accuracy_table(rows: Sequence[Accuracy], title: str, method: Cell, notes: list[str]) -> Table:
    """A row per task and metric."""
    columns = (
        Column("task", "left"),
        Column("metric", "left", fold=True),
        Column("method", "left"),
        Column("documents"),
        Column("plain"),
        Column("score"),
        Column("difference"),
        Column("better;\nworse"),
    )
    table = Table(columns, title, notes)
    for each in rows:
        table.add(
            each.task,
            each.metric,
            method,
            f"{each.documents}",
            _score(each.plain, each.plain_interval, sign=""),
            _score(each.accuracy, each.interval, sign=""),
            _score(each.difference, each.difference_interval, sign="+"),
            f"{each.better}; {each.worse}",
        )
    return table


def _score(value: float, bounds: Interval | None, *, sign: str) -> Cell:
    more = () if bounds is None else (f"[{bounds[0]:{sign}.3f}, {bounds[1]:{sign}.3f}]",)
    return Cell(f"{value:{sign}.3f}", more)


def _figures(rows: Sequence[Accuracy]) -> Any:
    import pandas  # when asked for: it takes a while

    flat: list[dict[str, Any]] = []
    for row in rows:
        values = asdict(row)
        for name in ("plain_interval", "interval", "difference_interval"):
            low, high = values.pop(name) or (None, None)
            prefix = name.removesuffix("_interval") if name != "interval" else "accuracy"
            values |= {f"{prefix}_low": low, f"{prefix}_high": high}
        flat.append(values)
    return pandas.DataFrame(flat)
