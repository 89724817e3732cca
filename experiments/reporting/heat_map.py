"""Heat maps of two-way tables: every cell is coloured and has its value and interval printed in it.

The colours can be told apart with any kind of colour vision, and in grey the values are still there.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm

from experiments.reporting import style
from experiments.results.comparison import Grid

_PANELS = (
    ("mean_acceptance_length", "mean acceptance length (tokens per target forward)", "cividis"),
    ("speedup", "speedup (tokens/s over plain decoding's; 1 is white)", "PuOr"),
)
_MISSING = "#e8e8e8"


@style.styled()
def heat_map(grids: Sequence[Grid], path: Path, subtitle: str, confidence: float) -> Path:
    """Draw mean acceptance length and speedup, a line of panels per grid, all grids in the same colours.

    Args:
        grids: The two-way tables of one comparison, at least one.
        path: The picture's file.
        subtitle: The run's conditions.
        confidence: Level of the intervals.
    """
    first = grids[0]
    shown = [panel for panel in _PANELS if any(_known(grids, panel[0]))]
    width = 1.4 + 0.07 * max(map(len, first.rows)) + max(2.4, 0.95 * len(first.columns))
    height = 1.0 + 0.48 * len(first.rows)
    figure = style.new_figure(max(style.PAGE, 0.8 * width * len(shown)), 1.0 + 0.8 * height * len(grids))
    panels = figure.subplots(len(grids), len(shown), squeeze=False)
    for number, (field, label, colors) in enumerate(shown):
        norm = _norm(field, list(_known(grids, field)))
        for grid, axes in zip(grids, panels[:, number], strict=True):
            _panel(axes, grid, field, norm, colors)
            axes.set_title(grid.conditions)
            if number == 0:
                axes.set_ylabel(grid.row)
        panels[-1, number].set_xlabel(first.column)
        mapped = panels[0, number].images[0]
        bar = figure.colorbar(mapped, ax=list(panels[:, number]), location="bottom", shrink=0.8, aspect=40)
        bar.set_label(label)
    title = f"{first.row} by {first.column}, with {confidence:.0%} intervals"
    style.title(figure, title, subtitle)
    return style.save(figure, path)


def _known(grids: Sequence[Grid], field: str) -> list[float]:
    values = [getattr(figures, field) for grid in grids for figures in grid.cells.values()]
    return [value for value in values if value is not None]


def _norm(field: str, values: Sequence[float]) -> Normalize:
    """The range of the colours; for a speedup with 1 in its middle, so that a colour says faster or slower."""
    if field == "speedup":
        reach = max(0.1, *(abs(value - 1) for value in values))
        return TwoSlopeNorm(1.0, 1.0 - reach, 1.0 + reach)
    low, high = min(values), max(values)
    return Normalize(low, high if high > low else low + 1)


def _panel(axes: Axes, grid: Grid, field: str, norm: Normalize, colors: str) -> None:
    table = np.full((len(grid.rows), len(grid.columns)), math.nan)
    for (row, column), figures in grid.cells.items():
        value = getattr(figures, field)
        table[grid.rows.index(row), grid.columns.index(column)] = math.nan if value is None else value
    image = axes.imshow(table, cmap=colors, norm=norm, aspect="auto")
    axes.set_facecolor(_MISSING)  # what has no value is left transparent
    for (row, column), figures in grid.cells.items():
        value = getattr(figures, field)
        if value is not None:
            at = (grid.columns.index(column), grid.rows.index(row))
            color = style.ink(image.cmap, float(norm(value)))
            _write(axes, at, value, getattr(figures, f"{field}_interval"), field, color)
    axes.set_xticks(range(len(grid.columns)), grid.columns)
    axes.set_yticks(range(len(grid.rows)), grid.rows)
    if sum(map(len, grid.columns)) > 12 * len(grid.columns):
        axes.tick_params(axis="x", labelrotation=30)
    axes.tick_params(length=0)
    axes.set_xticks(np.arange(len(grid.columns) - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(len(grid.rows) - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="minor", length=0)


def _write(
    axes: Axes, at: tuple[int, int], value: float, bounds: tuple[float, float] | None, field: str, color: str
) -> None:
    x, y = at
    unit = "x" if field == "speedup" else ""
    axes.text(x, y - (0.14 if bounds else 0), f"{value:.2f}{unit}", ha="center", va="center", color=color)
    if bounds:
        text = f"[{bounds[0]:.2f}, {bounds[1]:.2f}]"
        axes.text(x, y + 0.24, text, ha="center", va="center", color=color, fontsize=7)
