"""Two-way tables of a comparison: one setting down, another across."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.reporting import csv, markdown, terminal
from experiments.reporting.cells import NOTHING, number, times, with_interval
from experiments.reporting.heat_map import heat_map
from experiments.reporting.table import Cell, Column, Emphasis, Table
from experiments.results.comparison import Grid, Row, category_grids, grids
from experiments.results.summary import CategorySummary, MethodSummary

BOLD = "bold: the largest speedup of the exact methods, where chance does not explain its lead over the next"
_SHOWN = 4
"""Tables on a terminal; the file has them all."""


def report_two_way(rows: Sequence[Row], out: Path, subtitle: str, console: Console) -> list[Path]:
    """Print and write the two-way tables and heat maps of a comparison, where its runs differ in two settings.

    Args:
        rows: The comparison's rows.
        out: Folder for ``two_way.md``, ``two_way.csv`` and the pictures.
        subtitle: The second line of the pictures' titles.
        console: Where tables are printed.

    Returns:
        The files that were written.
    """
    confidence = rows[0].run.summary.confidence if rows else 0.0
    found = {"two_way": grids(rows), "categories": category_grids(rows)}
    written = []
    for name, listed in found.items():
        if not listed:
            continue
        tables = [two_way_table(grid, confidence) for grid in listed]
        for table in tables[:_SHOWN]:
            console.print(terminal.render(table, terminal.Frame.NARROW))
        if tables[_SHOWN:]:
            terminal.say(console, f"… and {len(tables) - _SHOWN} more tables of this kind in {name}.md")
        text = "\n".join(f"{table.title} ({'; '.join(table.notes)})\n\n{markdown.render(table)}" for table in tables)
        (out / f"{name}.md").write_text(text, encoding="utf-8")
        (out / f"{name}.csv").write_text(csv.render(long_table(listed)), encoding="utf-8")
        written += [out / f"{name}.md", out / f"{name}.csv"]
        picture = "heat_map.png" if name == "two_way" else "categories.png"
        written.append(heat_map(listed, out / picture, subtitle, confidence))
    return written


def two_way_table(grid: Grid, confidence: float) -> Table:
    """Mean acceptance length and speedup with their intervals; the fastest exact cell stands out (``Grid.best``)."""
    heading = f"{grid.row} \\ {grid.column}"
    conditions = f", at {grid.conditions}" if grid.fixed else ""
    table = Table(
        [Column(heading, "left"), *(Column(value) for value in grid.columns)],
        f"{grid.row} by {grid.column}{conditions}",
        [
            "mean acceptance length, then speedup",
            f"intervals at {confidence:.0%}",
            *([BOLD] if grid.best is not None else []),
        ],
    )
    for row in grid.rows:
        table.add(row, *(_cell(grid.cells.get((row, at)), best=(row, at) == grid.best) for at in grid.columns))
    return table


def _cell(figures: MethodSummary | CategorySummary | None, *, best: bool) -> Cell:
    if figures is None:
        return Cell(NOTHING)
    length = with_interval(number(figures.mean_acceptance_length), figures.mean_acceptance_length_interval)
    speed = with_interval(times(figures.speedup), figures.speedup_interval)
    return Cell(length.line, (speed.line,), joint="; ", emphasis=Emphasis.BEST if best else Emphasis.NONE)


def long_table(listed: Sequence[Grid]) -> Table:
    """A row per cell of all grids, with every figure in a column of its own: for spreadsheets and programs."""
    fixed = [name for name, _ in listed[0].fixed]
    names = [*fixed, listed[0].row, listed[0].column]
    figures = ("mean_acceptance_length", "speedup")
    columns = [column for name in figures for column in (name, f"{name}_low", f"{name}_high")]
    table = Table([Column(name, "left") for name in [*names, *columns, "tokens_per_second", "exactness"]])
    for grid in listed:
        for (row, column), found in grid.cells.items():
            cells = [value for _, value in grid.fixed] + [row, column]
            for name in figures:
                low, high = getattr(found, f"{name}_interval") or (None, None)
                cells += ["" if value is None else f"{value:.6g}" for value in (getattr(found, name), low, high)]
            speed = "" if found.tokens_per_second is None else f"{found.tokens_per_second:.6g}"
            table.add(*cells, speed, found.exactness or "")
    return table
