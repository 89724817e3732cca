"""One table for every report: what it says, apart from where it is shown.

A table is made once and rendered for a terminal (``terminal.py``), a document (``markdown.py``), a paper
(``latex.py``), the web (``html_table.py``) or a spreadsheet (``csv.py``). This module needs the standard library only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

NOTHING = "-"
"""What a cell says where there is nothing to say."""


class Emphasis(Enum):
    """How a cell stands out. Every medium has its own way; what a reader must know is in the text besides."""

    NONE = "none"
    BEST = "best"
    LOSSY = "lossy"
    MISSED = "missed"


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


@dataclass(frozen=True)
class Cell:
    """A cell that is more than a text.

    Attributes:
        text: What it says.
        more: What belongs to it, such as an interval: below it where the table is narrow, else behind it.
        joint: Stands between these parts on one line.
        emphasis: How it stands out.
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
        columns: The columns.
        title: What the table is about.
        notes: Sentences below it.
        rows: Cells of every row.
        sections: Numbers of the rows after which a section ends.
    """

    columns: Sequence[Column]
    title: str = ""
    notes: Sequence[str] = ()
    rows: list[list[Cell]] = field(default_factory=list)
    sections: set[int] = field(default_factory=set)

    def add(self, *cells: Cell | str, end_section: bool = False) -> None:
        """Append a row; a text stands for a cell that is nothing more."""
        if len(cells) != len(self.columns):
            raise ValueError(f"a row of {len(cells)} cells in a table of {len(self.columns)} columns")
        self.rows.append([Cell(cell) if isinstance(cell, str) else cell for cell in cells])
        if end_section:
            self.sections.add(len(self.rows) - 1)
