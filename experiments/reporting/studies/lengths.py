"""Tokens per round of what a study varies in two ways, and nothing that depends on time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.reporting import style
from experiments.reporting.columns import EMPTY, FAMILY, between, label_of, number
from experiments.reporting.formats import document, publish
from experiments.reporting.run_tables import made_with
from experiments.reporting.table import Cell, Table, left
from experiments.reporting.verdicts import warning
from experiments.results.records import PLAIN
from experiments.results.rows import Row, interval
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap
from experiments.results.timing import gain_over

Place = tuple[float, str, str]
"""A temperature, a row and a column."""


def report_lengths(
    runs: Sequence[Run], folder: Path, *, rows: str, about: str, columns: Mapping[str, str], missing: Sequence[str] = ()
) -> None:
    """Print a table, and write it with a picture of the same into a folder: ``lengths.md`` and ``lengths.png``.

    Args:
        runs: One whose labels are "column: row", or a sweep's, of which each is a column.
        rows: Heading of the rows' names.
        columns: Parts of the names of a sweep's columns, by the overrides that make them, as Hydra writes them.

    Raises:
        ValueError: Two methods have one place.
    """
    cells: dict[Place, tuple[Run, Row]] = {}
    for run in runs:
        named = ", ".join(name for override, name in columns.items() if override in run.manifest["overrides"])
        for row in run.rows:
            if row["method"] == PLAIN or not row["finished"]:
                continue
            label = label_of(row, run.manifest["config"]["labels"])
            column, _, name = (named, "", label) if named else label.rpartition(FAMILY)
            if (row["temperature"], name, column) in cells:
                raise ValueError(
                    f"{name!r} stands twice in the column {column!r}: name what differs in labels or columns"
                )
            cells[row["temperature"], name, column] = run, row
    temperatures, names, heads = (list(dict.fromkeys(parts)) for parts in zip(*cells, strict=True))
    signed = [
        f"signed: more than {names[0]} has in the same column, on the same prompts and given the drafts",
        "starred: an interval without zero",
    ]
    reference = "" if columns else names[0]
    table = Table.of(
        [(temperature, name) for temperature in sorted(temperatures) for name in names],
        [
            ("T", lambda at: f"{at[0]:g}"),
            (left(rows), lambda at: at[1]),
            *(
                (head, lambda at, head=head: _cell(cells.get((*at, head)), cells.get((at[0], reference, head))))
                for head in heads
            ),
        ],
        title=about,
        notes=["tokens per round / drafted nodes per round", *([] if columns else signed), *missing],
        section=lambda at: at[0],
    )
    panels = {
        f"tokens per round, T = {temperature:g}": {
            head: [
                (place, row["mean_acceptance_length"], interval(row, "mean_acceptance_length"))
                for place, name in enumerate(names)
                for _, row in filter(None, [cells.get((temperature, name, head))])
            ]
            for head in heads
        }
        for temperature in sorted(temperatures)
    }
    made, title = made_with(*runs), f"{about}, with {runs[0].rows[0]['confidence']:.0%} intervals"
    alarm, subtitle = warning([name for run in runs for name in run.not_lossless]), made.partition(". ")[0]
    publish(
        folder,
        "lengths",
        tables=[table],
        document=document(made, f"In a cell: {'; '.join(table.notes)}.", table),
        drawn=lambda: [
            style.rows_plot(
                folder / "lengths.png", names, panels, about=title, subtitle=subtitle, alarm=alarm, one_scale=True
            )
        ],
    )


def _cell(own: tuple[Run, Row] | None, first: tuple[Run, Row] | None) -> Cell:
    """A method's tokens per round, how many more these are than those of its column's first row, and its nodes."""
    if own is None:
        return EMPTY
    run, row = own
    more = [*between(interval(row, "mean_acceptance_length"))]
    if first is not None and first is not own:
        outputs, others = run.of(row), first[0].of(first[1])
        assert outputs is not None and others is not None, "runs that were read have outputs"
        gain = gain_over(outputs, others, Bootstrap(**run.manifest["config"]["bootstrap"]))
        if gain is not None:
            sure = gain.interval is not None and gain.interval[0] * gain.interval[1] > 0
            more.append(f"{gain.difference:+.2f}{'*' if sure else ''}")
    nodes = f"/ {number(row['proposed_nodes_per_round'], 1)}"
    return Cell(number(row["mean_acceptance_length"]), [*more, nodes])
