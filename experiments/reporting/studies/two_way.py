"""Two-way tables of a comparison, one setting down, another across, and their heat maps.

Every cell of a heat map is coloured and has its value and interval printed in it. The colours can be told apart with
any kind of colour vision, and in grey the values are still there.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import pandas
from rich.console import Console

from experiments.reporting import style, terminal
from experiments.reporting.columns import EMPTY, LENGTH, SPEEDUP, of_few
from experiments.reporting.formats import document, write_texts
from experiments.reporting.run_plots import FIGURES
from experiments.reporting.table import Cell, Column, Emphasis, Table, left
from experiments.results.comparison import Entry, Grid, grids
from experiments.results.frame import Frame
from experiments.results.rows import ALL, Row, interval

BOLD = "bold: the largest speedup of the exact methods, where chance does not explain its lead over the next"
_SHOWN = 4
"""Tables on a terminal; the file has them all."""
_COLORS = {"mean_acceptance_length": "cividis", "speedup": "PuOr"}
_MISSING = "#e8e8e8"


def report_two_way(
    entries: Sequence[Entry], out: Path, subtitle: str, console: Console, *, notes: Sequence[str] = ()
) -> list[Path]:
    """Print and write the two-way tables and heat maps of a comparison, where its runs differ in two settings.

    Returns:
        The files that were written.
    """
    confidence = entries[0].row["confidence"]
    written = []
    for name, listed in {"two_way": grids(entries), "categories": grids(entries, by_category=True)}.items():
        if not listed:
            continue
        tables = [two_way_table(grid, confidence, notes=notes) for grid in listed]
        terminal.show(console, *tables[:_SHOWN])
        if tables[_SHOWN:]:
            terminal.say(console, f"… and {len(tables) - _SHOWN} more tables of this kind in {name}.md")
        parts = [part for table in tables for part in (f"{table.title} ({'; '.join(table.notes)})", table)]
        csv = long_table(listed, noisy=bool(notes)).to_csv(index=False, lineterminator="\n", float_format="%.6g")
        written += write_texts(out, {f"{name}.md": document(*parts), f"{name}.csv": csv})
        picture = "heat_map.png" if name == "two_way" else "categories.png"
        written.append(heat_map(listed, out / picture, subtitle, confidence))
    return written


def two_way_table(grid: Grid, confidence: float, *, notes: Sequence[str] = ()) -> Table:
    """Mean acceptance length and speedup with their intervals; the fastest exact cell stands out (``Grid.best``)."""
    table = Table(
        [left(f"{grid.down} \\ {grid.across}"), *map(Column, grid.columns)],
        f"{grid.down} by {grid.across}{f', at {grid.conditions}' if grid.fixed else ''}",
        [
            "mean acceptance length, then speedup",
            f"intervals at {confidence:.0%}",
            *of_few(row["finished"] for row in grid.cells.values() if row["category"] != ALL),
            *([BOLD] if grid.best is not None else []),
            *notes,
        ],
    )
    for down in grid.rows:
        places = [(down, across) for across in grid.columns]
        table.add(down, *(_cell(grid.cells.get(place), best=place == grid.best) for place in places))
    return table


def _cell(row: Row | None, *, best: bool) -> Cell:
    if row is None:
        return EMPTY
    more = (SPEEDUP.cell(row).line,)
    return Cell(LENGTH.cell(row).line, more, joint="; ", emphasis=Emphasis.BEST if best else Emphasis.NONE)


def long_table(listed: Sequence[Grid], *, noisy: bool = False) -> Frame:
    """A row per cell of all grids, with every figure in a column of its own: for spreadsheets and programs."""
    names = [f"{figure}{end}" for figure in FIGURES for end in ("", "_low", "_high")]
    return pandas.DataFrame(
        {**grid.fixed, grid.down: down, grid.across: across}
        | {name: row[name] for name in (*names, "tokens_per_second", "exactness")}
        | {"noisy_timings": str(noisy).lower()}
        for grid in listed
        for (down, across), row in grid.cells.items()
    )


@style.styled()
def heat_map(listed: Sequence[Grid], path: Path, subtitle: str, confidence: float) -> Path:
    """Draw mean acceptance length and speedup, a line of panels per grid, all grids in the same colours."""
    from matplotlib.colors import Normalize, TwoSlopeNorm

    first = listed[0]
    known = {field: [f[field] for g in listed for f in g.cells.values() if f[field] is not None] for field in FIGURES}
    shown = [field for field in FIGURES if known[field]]
    width = 1.4 + 0.07 * max(map(len, first.rows)) + max(2.4, 0.95 * len(first.columns))
    height = 0.8 + 0.39 * len(first.rows)
    figure = style.new_figure(max(style.PAGE, 0.8 * width * len(shown)), 1.0 + height * len(listed))
    panels = figure.subplots(len(listed), len(shown), squeeze=False)
    for place, field in enumerate(shown):
        low, high = min(known[field]), max(known[field])
        norm = Normalize(low, high if high > low else low + 1)
        if field == "speedup":  # with 1 in the middle of the colours, so that one says faster or slower
            reach = max(0.1, *(abs(value - 1) for value in known[field]))
            norm = TwoSlopeNorm(1.0, 1.0 - reach, 1.0 + reach)
        column = panels[:, place]
        for grid, axes in zip(listed, column, strict=True):
            values = [[_value(grid.cells.get((down, across)), field) for across in grid.columns] for down in grid.rows]
            texts = {
                (grid.rows.index(down), grid.columns.index(across)): _text(row, field)
                for (down, across), row in grid.cells.items()
                if row[field] is not None
            }
            image = style.matrix(axes, values, texts, norm, _COLORS[field])
            axes.set_facecolor(_MISSING)  # what has no value is left transparent
            axes.set_xticks(range(len(grid.columns)), [style.wrapped(each, 16) for each in grid.columns])
            axes.set_yticks(range(len(grid.rows)), [style.wrapped(each, 24) for each in grid.rows])
            if sum(map(len, grid.columns)) > 12 * len(grid.columns):
                axes.tick_params(axis="x", labelrotation=30)
            axes.set(title=grid.conditions, ylabel=grid.down if place == 0 else "")
        column[-1].set_xlabel(first.across)
        label = FIGURES[field] + ("; 1 is white" if field == "speedup" else "")
        figure.colorbar(image, ax=list(column), location="bottom", shrink=0.8, aspect=40).set_label(label)
    return style.finish(figure, path, f"{first.down} by {first.across}, with {confidence:.0%} intervals", subtitle)


def _value(row: Row | None, field: str) -> float:
    return math.nan if row is None or row[field] is None else row[field]


def _text(row: Row, field: str) -> str:
    bounds, value = interval(row, field), f"{row[field]:.2f}{'x' if field == 'speedup' else ''}"
    return value if bounds is None else f"{value}\n[{bounds[0]:.2f}, {bounds[1]:.2f}]"
