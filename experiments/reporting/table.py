"""One table for every report: what it says, apart from where it is shown.

A table is made once and rendered for a terminal (``terminal.py``), a document or a spreadsheet (here), a paper
(``latex.py``) or the web (``html.py``). Commands make tables before anything heavy is loaded, so this module needs the
standard library only; pandas is imported where a data frame is asked for.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

if TYPE_CHECKING:
    import pandas

Item = TypeVar("Item")
NOTHING = "-"
"""The text of a cell that has nothing to say."""


class Emphasis(Enum):
    """How a cell stands out. Every medium has its own way; what a reader must know is in the text besides."""

    NONE = "none"
    BEST = "best"
    LOSSY = "lossy"
    MISSED = "missed"


_MARKS = {Emphasis.NONE: "", Emphasis.BEST: "**", Emphasis.LOSSY: "*", Emphasis.MISSED: "**"}


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        heading: What it shows, with the unit if it has one. It may hold line breaks; one behind a hyphen splits a word.
        align: Side to which its cells are aligned.
        fold: Long cells may be broken into lines; else they are kept on one.
        min_width, max_width: Limits in characters, in a terminal.
    """

    heading: str
    align: Literal["left", "right"] = "right"
    fold: bool = False
    min_width: int | None = None
    max_width: int | None = None

    @property
    def title(self) -> str:
        """The heading on one line."""
        return " ".join(self.heading.replace("/\n", "/").replace("-\n", "").split())


def left(heading: str, *, fold: bool = False, min_width: int | None = None, max_width: int | None = None) -> Column:
    """A column of words."""
    return Column(heading, "left", fold, min_width, max_width)


@dataclass(frozen=True)
class Cell:
    """A cell that is more than a text.

    Attributes:
        more: What belongs to it, such as an interval: below it where the table is narrow, else behind it.
        joint: Stands between these parts on one line.
    """

    text: str
    more: Sequence[str] = ()
    joint: str = " "
    emphasis: Emphasis = Emphasis.NONE

    @property
    def line(self) -> str:
        """Text and parts on one line."""
        return self.joint.join([self.text, *self.more])

    @property
    def stacked(self) -> str:
        """Text and parts, each on a line of its own."""
        return "\n".join([self.text, *self.more])


@dataclass
class Table:
    """Columns, rows, and what a reader has to know besides.

    Attributes:
        sections: Numbers of the rows after which a section ends.
    """

    columns: Sequence[Column]
    title: str = ""
    notes: Sequence[str] = ()
    rows: list[list[Cell]] = field(default_factory=list)
    sections: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        items: Sequence[Item],
        columns: Sequence[tuple[Column | str, Callable[[Item], Cell | str]]],
        *,
        title: str = "",
        notes: Sequence[str] = (),
        section: Callable[[Item], Any] | None = None,
    ) -> Self:
        """A row per item.

        Args:
            columns: Every column with what it says of an item; a text is the heading of a column of figures.
            section: Items for which this is equal stand in one section; None for a table without sections.
        """
        made = cls([Column(name) if isinstance(name, str) else name for name, _ in columns], title, notes)
        keys = [section(item) for item in items] if section is not None else []
        for number, item in enumerate(items):
            ends = bool(keys) and (number + 1 == len(keys) or keys[number + 1] != keys[number])
            made.add(*(cell(item) for _, cell in columns), end_section=ends)
        return made

    @classmethod
    def upright(
        cls,
        items: Sequence[Item],
        names: Iterable[str],
        lines: Iterable[tuple[str, Callable[[Item], Cell | str]]],
        *,
        title: str = "",
        notes: Sequence[str] = (),
    ) -> Self:
        """A column per item, under its name, and a row per figure: ``lines`` has the row's name and its cells.

        A row that would say nothing of any item is left out.
        """
        made = cls([Column("", "left"), *map(Column, names)], title, notes)
        for name, cell in lines:
            cells = [found if isinstance(found, Cell) else Cell(found) for found in map(cell, items)]
            if any(each.line.strip(f"{NOTHING}; ") for each in cells):
                made.add(name, *cells)
        return made

    def add(self, *cells: Cell | str, end_section: bool = False) -> None:
        """Append a row; a text stands for a cell that is nothing more."""
        if len(cells) != len(self.columns):
            raise ValueError(f"a row of {len(cells)} cells in a table of {len(self.columns)} columns")
        self.rows.append([Cell(cell) if isinstance(cell, str) else cell for cell in cells])
        if end_section:
            self.sections.add(len(self.rows) - 1)

    def frame(self) -> "pandas.DataFrame":
        """The table as a data frame: headings and cells on one line, without title, notes and emphasis."""
        import pandas

        rows = [[" ".join(cell.line.split()) for cell in row] for row in self.rows]
        return pandas.DataFrame(rows, columns=[column.title for column in self.columns])

    def csv(self) -> str:
        """The table for a spreadsheet."""
        return self.frame().to_csv(index=False, lineterminator="\n")

    def markdown(self) -> str:
        """Columns and rows in GitHub's Markdown; title and notes are for the document around them to place."""
        lines = [
            _bars(column.title for column in self.columns),
            "|" + "|".join("---:" if column.align == "right" else "---" for column in self.columns) + "|",
        ]
        lines += [_bars(map(_in_markdown, row)) for row in self.rows]
        return "\n".join(lines) + "\n"


def _bars(entries: Iterable[str]) -> str:
    return "| " + " | ".join(entries) + " |"


def _in_markdown(cell: Cell) -> str:
    mark = _MARKS[cell.emphasis] if cell.line else ""
    # A bar would end the cell.
    return mark + " ".join(cell.line.split()).replace("|", "\\|") + mark
