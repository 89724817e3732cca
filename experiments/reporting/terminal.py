"""Tables and sentences on a terminal, or in the file or pipe that stands for one. Needs rich only."""

import io
import sys
from collections.abc import Iterable
from pathlib import Path

import rich.table
from rich import box
from rich.console import Console
from rich.text import Text

from experiments.reporting.table import Emphasis, Table

PIPE_WIDTH = 120
"""Characters per line where the output goes into a file or a pipe."""

_STYLES = {Emphasis.NONE: "", Emphasis.BEST: "bold", Emphasis.LOSSY: "yellow", Emphasis.MISSED: "red"}


def console(width: int = PIPE_WIDTH, *, shown: bool = True) -> Console:
    """The terminal in its own width; a file or pipe in the given one."""
    if not shown:
        return Console(width=width, file=io.StringIO(), record=True)
    return Console(width=None if sys.stdout.isatty() else width, record=True)


def say(out: Console, *lines: str) -> None:
    """Print sentences as they are: no colors, and brackets mean brackets."""
    for line in lines:
        out.print(line, highlight=False, markup=False)


def show(out: Console, *tables: Table | None, stacked: bool = True) -> None:
    """Print those tables that there are; cells that are not to be stacked are where the table is too wide otherwise."""
    for table in filter(None, tables):
        wide = out.measure(render(table, stacked=False), options=out.options.update(width=1_000)).maximum
        out.print(render(table, stacked=stacked or wide > out.width))


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


def render(table: Table, *, stacked: bool) -> rich.table.Table:
    """The table for ``Console.print``; ``stacked``: a cell's parts stand below each other, not on one line."""
    made = rich.table.Table(
        box=box.HORIZONTALS,
        padding=(0, 1, 0, 0),
        title=Text(table.title) if table.title else None,
        caption=Text("; ".join(table.notes)) if table.notes else None,
        title_justify="left",
        caption_justify="left",
    )
    for column in table.columns:
        is_text = column.align == "left"
        made.add_column(
            Text(column.heading),
            justify=column.align,
            overflow="fold" if is_text else "ellipsis",
            no_wrap=not is_text,
            min_width=column.min_width,
        )
    for number, row in enumerate(table.rows):
        # A Text, because in a plain string rich would read brackets as its markup.
        texts = (Text(cell.stacked if stacked else cell.line, style=_STYLES[cell.emphasis]) for cell in row)
        made.add_row(*texts, end_section=number in table.sections)
    return made
