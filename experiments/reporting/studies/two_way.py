"""Two-way tables, one setting down and another across, and their heat maps: of a comparison, and of labelled runs.

Every cell of a heat map is coloured and has its value and interval printed in it. The colours can be told apart with
any kind of colour vision, and in grey the values are still there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments.reporting import style, terminal
from experiments.reporting.columns import BOLD, FAMILY, LENGTH, NODES, SPEEDUP, conditions_of
from experiments.reporting.formats import document, publish, write_texts
from experiments.reporting.run_plots import FIGURES
from experiments.reporting.table import NOTHING, Cell, Col, Emphasis, Table, words
from experiments.results.comparison import Entry, Grid, commit_of, dataset_name, grids
from experiments.results.records import PLAIN
from experiments.results.rows import Row
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap
from experiments.results.timing import gain_over

_SHOWN = 4
"""Tables on a terminal; the file has them all."""


_SHADES = {"mean_acceptance_length": (LENGTH, ""), "speedup": (SPEEDUP, "; 1 is white")}
"""What the panels of a heat map show."""


def report_two_way(
    entries: Sequence[Entry], out: Path, subtitle: str, console: Console, *, notes: Sequence[str] = ()
) -> list[Path]:
    """Print and write a comparison's tables by two settings, and by category, with a heat map."""
    confidence, written = entries[0].row["confidence"], []
    for name in ("two_way", "categories"):
        listed = grids(entries, by_category=name == "categories")
        if not listed:
            continue
        told = ["mean acceptance length, then speedup", *notes]
        tables = [two_way_table(grid, confidence, notes=told) for grid in listed]
        terminal.show(console, *tables[:_SHOWN])
        if tables[_SHOWN:]:
            terminal.say(console, f"… and {len(tables) - _SHOWN} more tables of this kind in {name}.md")
        parts = [part for table in tables for part in (f"{table.title} ({'; '.join(table.notes)})", table)]
        written += write_texts(out, {f"{name}.md": document(*parts)})
        if name == "two_way":
            title = f"{listed[0].down} by {listed[0].across}, with {confidence:.0%} intervals"
            written.append(heat_map(listed, out / "heat_map.png", title, subtitle))
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
    """Print tokens per round, a table per temperature, and write ``lengths.md`` and the heat map ``lengths.png``.

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
    title, picture = f"{about}, with {bootstrap.confidence:.0%} intervals", folder / "lengths.png"
    publish(
        folder,
        "lengths",
        tables=tables,
        document=document(f"{about}. {made}.", f"In a cell: {'; '.join(notes)}.", *parts),
        drawn=lambda: [heat_map(listed, picture, title, made, ["mean_acceptance_length"])],
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


@style.styled()
def heat_map(
    listed: Sequence[Grid], path: Path, title: str, subtitle: str, fields: Sequence[str] = tuple(_SHADES)
) -> Path:
    """Draw a panel per field, a line of panels per grid, all grids in the same colours.

    Above and below plain decoding's speed are scales of their own, each to its largest value, so that one cell far
    below leaves colours for the differences among the others. A cell without a value is grey.
    """
    from matplotlib.colors import Normalize, TwoSlopeNorm

    rows = [row for grid in listed for row in grid.cells.values()]
    known = {field: [row[field] for row in rows if row[field] is not None] for field in fields}
    shown = [field for field in fields if known[field]] or fields[:1]
    width = 1.4 + 0.07 * max(map(len, listed[0].rows)) + max(2.4, 0.95 * len(listed[0].columns))
    height = 1.0 + (0.8 + 0.39 * len(listed[0].rows)) * len(listed)
    figure = style.new_figure(max(style.PAGE, 0.8 * width * len(shown)), height)
    panels = figure.subplots(len(listed), len(shown), squeeze=False)
    for place, field in enumerate(shown):
        low, high = min(known[field], default=0.0), max(known[field], default=0.0)
        norm, colors = Normalize(low, high if high > low else low + 1), "cividis"
        if field == "speedup":
            norm, colors = TwoSlopeNorm(1.0, min(low, 0.9), max(high, 1.1)), "PuOr"
        column, more = _SHADES[field]
        for grid, axes in zip(listed, panels[:, place], strict=True):
            cells = {
                (x, y): row
                for y, down in enumerate(grid.rows)
                for x, across in enumerate(grid.columns)
                if (row := grid.cells.get((down, across))) is not None
            }
            values = np.full((len(grid.rows), len(grid.columns)), np.nan)
            for (x, y), row in cells.items():
                values[y, x] = np.nan if row[field] is None else row[field]
            image = axes.imshow(values, cmap=colors, norm=norm, aspect="auto")
            for (x, y), row in cells.items():
                # Black or white, whichever has the stronger contrast (relative luminance by WCAG 2).
                light = np.power(image.cmap(float(norm(values[y, x])))[:3], 2.2) @ (0.2126, 0.7152, 0.0722)
                color = style.FAINT if row[field] is None else "black" if light > 0.179 else "white"
                looks = {"ha": "center", "va": "center", "fontsize": style.SMALLEST, "color": color}
                axes.text(x, y, column.cell(row).stacked, **looks)
            axes.set_facecolor("#e8e8e8")
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            axes.grid(visible=False)
            axes.set_xticks(range(len(grid.columns)), [style.wrapped(name, 16) for name in grid.columns])
            axes.set_yticks(range(len(grid.rows)), [style.wrapped(name, 24) for name in grid.rows])
            axes.set(title=grid.conditions, ylabel=grid.down if place == 0 else "", xlabel=grid.across)
        bar = figure.colorbar(image, ax=list(panels[:, place]), location="bottom", shrink=0.8, aspect=40)
        bar.set_label(FIGURES[field] + more)
    return style.finish(figure, path, title, subtitle)
