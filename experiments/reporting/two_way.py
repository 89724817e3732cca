"""Two-way tables of a comparison, one setting down, another across, and their heat maps.

Every cell of a heat map is coloured and has its value and interval printed in it. The colours can be told apart with
any kind of colour vision, and in grey the values are still there.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from experiments.reporting import style, terminal
from experiments.reporting.cells import EMPTY, number, times, with_interval
from experiments.reporting.formats import document, write_texts
from experiments.reporting.table import Cell, Column, Emphasis, Table, left
from experiments.results.comparison import Grid, Row, category_grids, grids
from experiments.results.summary import CategorySummary, MethodSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

BOLD = "bold: the largest speedup of the exact methods, where chance does not explain its lead over the next"
_SHOWN = 4
"""Tables on a terminal; the file has them all."""
_PANELS = (
    ("mean_acceptance_length", "mean acceptance length (tokens per target forward)", "cividis"),
    ("speedup", "speedup (tokens/s over plain decoding's; 1 is white)", "PuOr"),
)
_MISSING = "#e8e8e8"


def report_two_way(
    rows: Sequence[Row], out: Path, subtitle: str, console: Console, *, notes: Sequence[str] = ()
) -> list[Path]:
    """Print and write the two-way tables and heat maps of a comparison, where its runs differ in two settings.

    Args:
        rows: The comparison's rows.
        out: Folder for ``two_way.md``, ``two_way.csv`` and the pictures.
        subtitle: The second line of the pictures' titles.
        console: Where tables are printed.
        notes: Warnings that belong to every table, such as noisy timings.

    Returns:
        The files that were written.
    """
    confidence = rows[0].run.summary.confidence if rows else 0.0
    written = []
    for name, listed in {"two_way": grids(rows), "categories": category_grids(rows)}.items():
        if not listed:
            continue
        tables = [two_way_table(grid, confidence, notes=notes) for grid in listed]
        for table in tables[:_SHOWN]:
            console.print(terminal.render(table, terminal.Frame.NARROW))
        if tables[_SHOWN:]:
            terminal.say(console, f"… and {len(tables) - _SHOWN} more tables of this kind in {name}.md")
        parts = [part for table in tables for part in (f"{table.title} ({'; '.join(table.notes)})", table)]
        texts = {f"{name}.md": document(*parts), f"{name}.csv": long_table(listed, noisy=bool(notes)).csv()}
        written += write_texts(out, texts)
        picture = "heat_map.png" if name == "two_way" else "categories.png"
        written.append(heat_map(listed, out / picture, subtitle, confidence))
    return written


def two_way_table(grid: Grid, confidence: float, *, notes: Sequence[str] = ()) -> Table:
    """Mean acceptance length and speedup with their intervals; the fastest exact cell stands out (``Grid.best``)."""
    table = Table(
        [left(f"{grid.row} \\ {grid.column}"), *map(Column, grid.columns)],
        f"{grid.row} by {grid.column}{f', at {grid.conditions}' if grid.fixed else ''}",
        [
            "mean acceptance length, then speedup",
            f"intervals at {confidence:.0%}",
            *([BOLD] if grid.best is not None else []),
            *notes,
        ],
    )
    for row in grid.rows:
        table.add(row, *(_cell(grid.cells.get((row, each)), best=(row, each) == grid.best) for each in grid.columns))
    return table


def _cell(figures: MethodSummary | CategorySummary | None, *, best: bool) -> Cell:
    if figures is None:
        return EMPTY
    length = with_interval(number(figures.mean_acceptance_length), figures.mean_acceptance_length_interval)
    speed = with_interval(times(figures.speedup), figures.speedup_interval)
    return Cell(length.line, (speed.line,), joint="; ", emphasis=Emphasis.BEST if best else Emphasis.NONE)


def long_table(listed: Sequence[Grid], *, noisy: bool = False) -> Table:
    """A row per cell of all grids, with every figure in a column of its own: for spreadsheets and programs."""
    names = [*(name for name, _ in listed[0].fixed), listed[0].row, listed[0].column]
    figures = [f"{name}{end}" for name in ("mean_acceptance_length", "speedup") for end in ("", "_low", "_high")]
    table = Table([left(name) for name in [*names, *figures, "tokens_per_second", "exactness", "noisy_timings"]])
    for grid in listed:
        for place, found in grid.cells.items():
            values = [
                found.mean_acceptance_length,
                *(found.mean_acceptance_length_interval or (None, None)),
                found.speedup,
                *(found.speedup_interval or (None, None)),
                found.tokens_per_second,
            ]
            given = ["" if value is None else f"{value:.6g}" for value in values]
            table.add(*(value for _, value in grid.fixed), *place, *given, found.exactness or "", str(noisy).lower())
    return table


@style.styled()
def heat_map(listed: Sequence[Grid], path: Path, subtitle: str, confidence: float) -> Path:
    """Draw mean acceptance length and speedup, a line of panels per grid, all grids in the same colours.

    Args:
        listed: The two-way tables of one comparison, at least one.
        path: The picture's file.
        subtitle: The run's conditions.
        confidence: Level of the intervals.
    """
    first = listed[0]
    shown = [panel for panel in _PANELS if _known(listed, panel[0])]
    width = 1.4 + 0.07 * max(map(len, first.rows)) + max(2.4, 0.95 * len(first.columns))
    height = 1.0 + 0.48 * len(first.rows)
    figure = style.new_figure(max(style.PAGE, 0.8 * width * len(shown)), 1.0 + 0.8 * height * len(listed))
    panels = figure.subplots(len(listed), len(shown), squeeze=False)
    for number_, (field, label, colors) in enumerate(shown):
        norm = _norm(field, _known(listed, field))
        for grid, axes in zip(listed, panels[:, number_], strict=True):
            _panel(axes, grid, field, norm, colors)
            axes.set_title(grid.conditions)
            axes.set_ylabel(grid.row if number_ == 0 else "")
        panels[-1, number_].set_xlabel(first.column)
        column = panels[:, number_]
        bar = figure.colorbar(column[0].images[0], ax=list(column), location="bottom", shrink=0.8, aspect=40)
        bar.set_label(label)
    style.title(figure, f"{first.row} by {first.column}, with {confidence:.0%} intervals", subtitle)
    return style.save(figure, path)


def _known(listed: Sequence[Grid], field: str) -> list[float]:
    values = [getattr(figures, field) for grid in listed for figures in grid.cells.values()]
    return [value for value in values if value is not None]


def _norm(field: str, values: Sequence[float]) -> "Normalize":
    """The range of the colours; for a speedup with 1 in its middle, so that a colour says faster or slower."""
    from matplotlib.colors import Normalize, TwoSlopeNorm

    if field == "speedup":
        reach = max(0.1, *(abs(value - 1) for value in values))
        return TwoSlopeNorm(1.0, 1.0 - reach, 1.0 + reach)
    low, high = min(values), max(values)
    return Normalize(low, high if high > low else low + 1)


def _panel(axes: "Axes", grid: Grid, field: str, norm: "Normalize", colors: str) -> None:
    places = {(row, column): (x, y) for y, row in enumerate(grid.rows) for x, column in enumerate(grid.columns)}
    table = [[math.nan] * len(grid.columns) for _ in grid.rows]
    values = {places[cell]: figures for cell, figures in grid.cells.items() if getattr(figures, field) is not None}
    for (x, y), figures in values.items():
        table[y][x] = getattr(figures, field)
    image = axes.imshow(table, cmap=colors, norm=norm, aspect="auto")
    axes.set_facecolor(_MISSING)  # what has no value is left transparent
    for (x, y), figures in values.items():
        value, bounds = getattr(figures, field), getattr(figures, f"{field}_interval")
        ink: dict[str, Any] = {"ha": "center", "va": "center", "color": style.ink(image.cmap, float(norm(value)))}
        axes.text(x, y - (0.14 if bounds else 0), f"{value:.2f}{'x' if field == 'speedup' else ''}", **ink)
        if bounds:
            axes.text(x, y + 0.24, f"[{bounds[0]:.2f}, {bounds[1]:.2f}]", fontsize=style.SMALLEST, **ink)
    axes.set_xticks(range(len(grid.columns)), [style.wrapped(column, 16) for column in grid.columns])
    axes.set_yticks(range(len(grid.rows)), [style.wrapped(row, 24) for row in grid.rows])
    if sum(map(len, grid.columns)) > 12 * len(grid.columns):
        axes.tick_params(axis="x", labelrotation=30)
    axes.set_xticks([x + 0.5 for x in range(len(grid.columns) - 1)], minor=True)
    axes.set_yticks([y + 0.5 for y in range(len(grid.rows) - 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)
