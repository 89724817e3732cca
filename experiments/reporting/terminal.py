"""Tables and sentences on a terminal, or in the file or pipe that stands for one. Needs rich only."""

import io
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

import rich.table
from rich import box
from rich.console import Console
from rich.text import Text

from experiments.reporting.table import Emphasis, Table

PIPE_WIDTH = 120
"""Characters per line where the output goes into a file or a pipe."""

_STYLES = {Emphasis.NONE: "", Emphasis.BEST: "bold", Emphasis.LOSSY: "yellow", Emphasis.MISSED: "red"}


class Frame(Enum):
    """How much room a table takes."""

    FULL = "full"
    """Lines around every cell, all parts of a cell on one line."""
    NARROW = "narrow"
    """Lines between sections only, a cell's parts below each other: many columns fit in 120 characters."""


def console(width: int = PIPE_WIDTH, *, shown: bool = True) -> Console:
    """The terminal in its own width; a file or pipe in the given one."""
    if not shown:
        return Console(width=width, file=io.StringIO(), record=True)
    return Console(width=None if sys.stdout.isatty() else width, record=True)


def say(out: Console, *lines: str) -> None:
    """Print sentences as they are: no colors, and brackets mean brackets."""
    for line in lines:
        out.print(line, highlight=False, markup=False)


def show(out: Console, *tables: Table | None, frame: Frame = Frame.NARROW) -> None:
    """Print those tables that there are: full ones as narrow ones where only these fit."""
    for table in filter(None, tables):
        options, kinds = out.options.update(width=1_000), (frame, Frame.NARROW)
        wide, narrow = (out.measure(render(table, kind), options=options).maximum for kind in kinds)
        out.print(render(table, Frame.NARROW if wide > out.width >= narrow else frame))


def list_written(out: Console, paths: Iterable[Path | None]) -> None:
    """Say which files were written: a line for each folder, which is not broken. None stands for no picture."""
    folders: dict[Path, list[str]] = {}
    for path in filter(None, paths):
        folders.setdefault(path.parent, []).append(path.name)
    for folder, names in folders.items():
        text = f"wrote into {short(folder)}: {', '.join(names)}"
        out.print(text, highlight=False, markup=False, soft_wrap=True)


def short(path: Path) -> str:
    """A path as seen from the working directory, where it is below that."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def render(table: Table, frame: Frame = Frame.FULL) -> rich.table.Table:
    """The table for ``Console.print``."""
    made = rich.table.Table(
        title=Text(table.title) if table.title else None,
        caption=Text("; ".join(table.notes)) if table.notes else None,
        title_justify="left",
        caption_justify="left",
    )
    if frame is Frame.NARROW:
        made.box, made.padding = box.HORIZONTALS, (0, 1, 0, 0)
    for column in table.columns:
        is_text = column.align == "left"
        made.add_column(
            Text(column.heading),
            justify=column.align,
            overflow="fold" if is_text else "ellipsis",
            no_wrap=frame is not Frame.FULL and not is_text,
            min_width=column.min_width,
        )
    for number, row in enumerate(table.rows):
        # A Text, because in a plain string rich would read brackets as its markup.
        texts = (
            Text(cell.stacked if frame is Frame.NARROW else cell.line, style=_STYLES[cell.emphasis]) for cell in row
        )
        made.add_row(*texts, end_section=number in table.sections)
    return made
