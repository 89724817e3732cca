"""Tokens per round of what a study varies in two ways, and nothing that depends on time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.reporting.columns import FAMILY, LENGTH, NODES
from experiments.reporting.comparison import conditions_of
from experiments.reporting.formats import document, publish
from experiments.reporting.studies.two_way import heat_map, two_way_table
from experiments.reporting.table import Cell
from experiments.results.comparison import Grid, commit_of, dataset_name
from experiments.results.records import PLAIN
from experiments.results.rows import Row
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap
from experiments.results.timing import gain_over


def report_lengths(
    runs: Sequence[Run],
    folder: Path,
    *,
    rows: str,
    about: str,
    columns: Mapping[str, str] = {},
    missing: Sequence[str] = (),
) -> None:
    """Print a table per temperature, and write it with its heat map into a folder: ``lengths.md``, ``lengths.png``.

    Args:
        runs: One whose labels are "column: row", or a sweep's, of which each is a column.
        rows: Heading of the rows' names.
        columns: Parts of the names of a sweep's columns, by the overrides that make them, as Hydra writes them.

    Raises:
        ValueError: Two methods have one place.
    """
    cells: dict[str, dict[tuple[str, str], Row]] = {}  # by temperature, row and column
    for run in runs:
        column = ", ".join(name for override, name in columns.items() if override in run.manifest["overrides"])
        for row in run.rows:
            if row["method"] == PLAIN or not row["finished"]:
                continue
            head, _, name = (column, "", row["label"]) if column else row["label"].rpartition(FAMILY)
            placed = cells.setdefault(f"{row['temperature']:g}", {})
            if (name, head) in placed:
                raise ValueError(
                    f"{name!r} stands twice in the column {head!r}: name what differs in labels or columns"
                )
            placed[name, head] = row | {"outputs": run.of(row)}
    names, heads = (
        tuple(dict.fromkeys(parts)) for parts in zip(*(at for own in cells.values() for at in own), strict=True)
    )
    bootstrap = Bootstrap(**runs[0].manifest["config"]["bootstrap"])
    for own in cells.values() if not columns else ():
        for (name, head), row in own.items():
            if name != names[0] and (names[0], head) in own:
                row["gain_over_first"] = gain_over(row["outputs"], own[names[0], head]["outputs"], bootstrap)
    signed = f"signed: more than {names[0]} has in the same column, on the same prompts and given the drafts; "
    notes = ["tokens per round / drafted nodes per round", *missing]
    notes += [] if columns else [f"{signed}starred: an interval without zero"]
    grids = [Grid(rows, "column", names, heads, {"T": at}, cells[at]) for at in sorted(cells, key=float)]
    tables = [two_way_table(grid, bootstrap.confidence, notes=notes, cell=_cell) for grid in grids]
    facts = (dataset_name, lambda run: f"{run.manifest['config']['sampling']['max_new_tokens']} new tokens")
    made = ", ".join(conditions_of(runs, *facts, lambda run: f"commit {commit_of(run.manifest)}"))
    shown = [part for table in tables for part in (table.title, table)]
    picture = folder / "lengths.png"
    publish(
        folder,
        "lengths",
        tables=tables,
        document=document(f"{about}. {made}.", f"In a cell: {'; '.join(notes)}.", *shown),
        drawn=lambda: [heat_map(grids, picture, made, bootstrap.confidence, about, [LENGTH])],
    )


def _cell(row: Row) -> Cell:
    """A method's tokens per round, how many more these are than those of its column's first row, and its nodes."""
    cell, gain = LENGTH.cell(row), row.get("gain_over_first")
    more = [*cell.more]
    if gain is not None:
        sure = gain.interval is not None and gain.interval[0] * gain.interval[1] > 0
        more.append(f"{gain.difference:+.2f}{'*' if sure else ''}")
    return Cell(cell.text, [*more, f"/ {NODES.cell(row).text}"])
