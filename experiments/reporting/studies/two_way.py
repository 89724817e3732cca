"""Two-way tables, one setting down and another across: of a comparison, and of labelled runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from experiments.reporting import terminal
from experiments.reporting.columns import BOLD, FAMILY, LENGTH, NODES, SPEEDUP, conditions_of
from experiments.reporting.formats import document, publish, write_texts
from experiments.reporting.run_plots import length_and_speedup
from experiments.reporting.table import NOTHING, Cell, Col, Emphasis, Table, words
from experiments.results.comparison import Entry, Grid, commit_of, dataset_name, grids
from experiments.results.records import PLAIN
from experiments.results.rows import Row
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap
from experiments.results.timing import gain_over

_SHOWN = 4
"""Tables on a terminal; the file has them all."""


def report_two_way(entries: Sequence[Entry], out: Path, console: Console, *, notes: Sequence[str] = ()) -> list[Path]:
    """Print and write a comparison's tables by two settings, and by category, where its runs differ in these."""
    confidence, written = entries[0].row["confidence"], []
    for name in ("two_way", "categories"):
        told = ["mean acceptance length, then speedup", *notes]
        listed = grids(entries, by_category=name == "categories")
        tables = [two_way_table(grid, confidence, notes=told) for grid in listed]
        terminal.show(console, *tables[:_SHOWN])
        if tables[_SHOWN:]:
            terminal.say(console, f"… and {len(tables) - _SHOWN} more tables of this kind in {name}.md")
        parts = [part for table in tables for part in (f"{table.title} ({'; '.join(table.notes)})", table)]
        written += write_texts(out, {f"{name}.md": document(*parts)} if tables else {})
    return written


def report_lengths(
    runs: Sequence[Run],
    folder: Path,
    *,
    rows: str,
    about: str,
    columns: Mapping[str, str] = {},
    missing: Sequence[str] = (),
) -> None:
    """Print tokens per round, a table per temperature, and write ``lengths.md`` and ``lengths.png``.

    Args:
        runs: One whose labels are "column: row", or a sweep's, of which each is a column.
        rows: Heading of the rows' names.
        columns: Parts of the names of a sweep's columns, by the overrides that make them, as Hydra writes them.

    Raises:
        ValueError: Two methods have one place.
    """
    cells: dict[float, dict[tuple[str, str], tuple[Row, Run]]] = {}  # by temperature, row and column
    bootstrap = Bootstrap(**runs[0].manifest["config"]["bootstrap"])
    for run in runs:
        column = ", ".join(name for override, name in columns.items() if override in run.manifest["overrides"])
        for row in run.rows:
            if row["method"] == PLAIN or not row["finished"]:
                continue
            head, _, name = (column, "", row["label"]) if column else row["label"].rpartition(FAMILY)
            placed = cells.setdefault(row["temperature"], {})
            if (name, head) in placed:
                where = f"{name!r} stands twice in the column {head!r}"
                raise ValueError(f"{where}: name what differs in labels or columns")
            placed[name, head] = row, run
    places = [place for placed in cells.values() for place in placed]
    names, heads = (tuple(dict.fromkeys(parts)) for parts in zip(*places, strict=True))
    listed = []
    for at, placed in sorted(cells.items()):
        shown = {place: row for place, (row, _) in placed.items()}
        for (name, head), (row, run) in placed.items() if not columns else ():
            if name != names[0] and (names[0], head) in placed:
                first, of_first = placed[names[0], head]
                shown[name, head] = row | {"gain_over_first": gain_over(run.of(row), of_first.of(first), bootstrap)}
        listed.append(Grid(rows, "column", names, heads, {"T": f"{at:g}"}, shown))
    signed = f"signed: more than {names[0]} has in the same column, on the same prompts and given the drafts"
    notes = ["tokens per round / drafted nodes per round", *missing]
    notes += [] if columns else [signed, "starred: an interval without zero"]
    tables = [two_way_table(grid, bootstrap.confidence, notes=notes, cell=_length) for grid in listed]
    facts = (dataset_name, lambda run: f"{run.manifest['config']['sampling']['max_new_tokens']} new tokens")
    made = ", ".join(conditions_of(runs, *facts, lambda run: f"commit {commit_of(run.manifest)}"))
    parts = [part for table in tables for part in (table.title, table)]
    named = [(f"{head}: {name}".removeprefix(": "), row) for grid in listed for (name, head), row in grid.cells.items()]
    publish(
        folder,
        "lengths",
        tables=tables,
        document=document(f"{about}. {made}.", f"In a cell: {'; '.join(notes)}.", *parts),
        drawn=lambda: filter(
            None, [length_and_speedup(named, folder / "lengths.png", about, made, ["mean_acceptance_length"])]
        ),
    )


def _length(row: Row) -> Cell:
    """A method's tokens per round, how many more these are than those of its column's first row, and its nodes."""
    cell, gain = LENGTH.cell(row), row.get("gain_over_first")
    more = [*cell.more]
    if gain is not None:
        sure = gain.interval is not None and gain.interval[0] * gain.interval[1] > 0
        more.append(f"{gain.difference:+.2f}{'*' if sure else ''}")
    return Cell(cell.text, [*more, f"/ {NODES.cell(row).text}"])


def _length_and_speedup(row: Row) -> Cell:
    return Cell(LENGTH.cell(row).line, (SPEEDUP.cell(row).line,), joint="; ")


def two_way_table(
    grid: Grid, confidence: float, *, notes: Sequence[str] = (), cell: Callable[[Row], Cell] = _length_and_speedup
) -> Table:
    """The ``cell`` of every row; the fastest exact method stands out (``Grid.best``)."""
    about = [f"intervals at {confidence:.0%}", *([BOLD] if grid.best is not None else []), *notes]
    title = f"{grid.down} by {grid.across}{f', at {grid.conditions}' if grid.fixed else ''}"
    table = Table([words(f"{grid.down} \\ {grid.across}"), *map(Col, grid.columns)], title, about)
    for down in grid.rows:
        made = {place: cell(grid.cells[place]) for place in grid.cells if place[0] == down}
        if grid.best in made:
            made[grid.best] = replace(made[grid.best], emphasis=Emphasis.BEST)
        table.add(down, *(made.get((down, across), Cell(NOTHING)) for across in grid.columns))
    return table
