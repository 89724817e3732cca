"""Two-way tables of a comparison, one setting down, another across, and their heat maps.

Every cell of a heat map is coloured and has its value and interval printed in it. The colours can be told apart with
any kind of colour vision, and in grey the values are still there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas
from rich.console import Console

from experiments.reporting import style, terminal
from experiments.reporting.columns import BOLD, LENGTH, SPEEDUP
from experiments.reporting.formats import csv_text, document, write_texts
from experiments.reporting.run_plots import FIGURES
from experiments.reporting.table import NOTHING, Cell, Col, Emphasis, Table, words
from experiments.results.comparison import Entry, Grid, grids
from experiments.results.frame import Frame
from experiments.results.rows import Row

_SHOWN = 4
"""Tables on a terminal; the file has them all."""
_COLORS = {"mean_acceptance_length": "cividis", "speedup": "PuOr"}


def report_two_way(
    entries: Sequence[Entry], out: Path, subtitle: str, console: Console, *, notes: Sequence[str] = ()
) -> list[Path]:
    """Print and write the two-way tables and heat maps of a comparison, where its runs differ in two settings.

    Returns:
        The files that were written.
    """
    confidence, written = entries[0].row["confidence"], []
    for name, picture in (("two_way", "heat_map.png"), ("categories", "categories.png")):
        listed = grids(entries, by_category=name == "categories")
        if not listed:
            continue
        tables = [two_way_table(grid, confidence, notes=notes) for grid in listed]
        terminal.show(console, *tables[:_SHOWN])
        if tables[_SHOWN:]:
            terminal.say(console, f"… and {len(tables) - _SHOWN} more tables of this kind in {name}.md")
        parts = [part for table in tables for part in (f"{table.title} ({'; '.join(table.notes)})", table)]
        written += write_texts(out, {f"{name}.md": document(*parts), f"{name}.csv": csv_text(long_table(listed))})
        written.append(heat_map(listed, out / picture, subtitle, confidence))
    return written


def _cell(row: Row) -> Cell:
    return Cell(LENGTH.cell(row).line, (SPEEDUP.cell(row).line,), joint="; ")


def two_way_table(
    grid: Grid, confidence: float, *, notes: Sequence[str] = (), cell: Callable[[Row], Cell] = _cell
) -> Table:
    """The ``cell`` of every row; the fastest exact method stands out (``Grid.best``)."""
    about = ["mean acceptance length, then speedup"] if cell is _cell else []
    about += [f"intervals at {confidence:.0%}", *([BOLD] if grid.best is not None else []), *notes]
    title = f"{grid.down} by {grid.across}{f', at {grid.conditions}' if grid.fixed else ''}"
    table = Table([words(f"{grid.down} \\ {grid.across}"), *map(Col, grid.columns)], title, about)
    for down in grid.rows:
        made = {place: cell(grid.cells[place]) for place in grid.cells if place[0] == down}
        if grid.best in made:
            made[grid.best] = replace(made[grid.best], emphasis=Emphasis.BEST)
        table.add(down, *(made.get((down, across), Cell(NOTHING)) for across in grid.columns))
    return table


def long_table(listed: Sequence[Grid]) -> Frame:
    """A row per cell of all grids, with every figure in a column of its own: for spreadsheets and programs."""
    names = [
        *(f"{figure}{end}" for figure in FIGURES for end in ("", "_low", "_high")),
        "tokens_per_second",
        "exactness",
    ]
    return pandas.DataFrame(
        {**grid.fixed, grid.down: down, grid.across: across} | {name: row[name] for name in names}
        for grid in listed
        for (down, across), row in grid.cells.items()
    )


@style.styled()
def heat_map(
    listed: Sequence[Grid],
    path: Path,
    subtitle: str,
    confidence: float,
    about: str = "",
    columns: Sequence[Col] = (LENGTH, SPEEDUP),
) -> Path:
    """Draw a panel per column, a line of panels per grid, all grids in the same colours."""
    from matplotlib.colors import Normalize, TwoSlopeNorm

    first, rows = listed[0], [row for grid in listed for row in grid.cells.values()]
    by_field = {str(column.field): column for column in columns}
    known = {field: [row[field] for row in rows if row[field] is not None] for field in by_field}
    shown = [field for field in by_field if known[field]]
    width = 1.4 + 0.07 * max(map(len, first.rows)) + max(2.4, 0.95 * len(first.columns))
    height = 1.0 + (0.8 + 0.39 * len(first.rows)) * len(listed)
    figure = style.new_figure(max(style.PAGE, 0.8 * width * len(shown)), height)
    panels = figure.subplots(len(listed), len(shown), squeeze=False)
    for place, field in enumerate(shown):
        low, high = min(known[field]), max(known[field])
        norm = Normalize(low, high if high > low else low + 1)
        if field == "speedup":  # with 1 in the middle of the colours, so that one says faster or slower
            reach = max(0.1, *(abs(value - 1) for value in known[field]))
            norm = TwoSlopeNorm(1.0, 1.0 - reach, 1.0 + reach)
        for grid, axes in zip(listed, panels[:, place], strict=True):
            cells = [[grid.cells.get((down, across), {}) for across in grid.columns] for down in grid.rows]
            values = [[math.nan if row.get(field) is None else row[field] for row in line] for line in cells]
            texts = {
                (y, x): by_field[field].cell(r).stacked for y, line in enumerate(cells) for x, r in enumerate(line) if r
            }
            image = style.matrix(axes, values, texts, norm, _COLORS[field])
            axes.set_facecolor("#e8e8e8")  # a cell without a value is left transparent
            axes.set_xticks(range(len(grid.columns)), [style.wrapped(name, 16) for name in grid.columns])
            axes.set_yticks(range(len(grid.rows)), [style.wrapped(name, 24) for name in grid.rows])
            axes.set(title=grid.conditions, ylabel=grid.down if place == 0 else "", xlabel=grid.across)
        label = FIGURES[field] + ("; 1 is white" if field == "speedup" else "")
        figure.colorbar(image, ax=list(panels[:, place]), location="bottom", shrink=0.8, aspect=40).set_label(label)
    title = f"{about or f'{first.down} by {first.across}'}, with {confidence:.0%} intervals"
    return style.finish(figure, path, title, subtitle)
