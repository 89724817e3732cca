"""One table for every report: its columns, and what it says, apart from where it is shown.

A table is made once, and rendered for a terminal (``terminal.py``), by the HTML report, or here for documents.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Self

NOTHING = "-"
"""The text of a cell that has nothing to say."""


class Emphasis(Enum):
    """How a cell stands out. Every medium has its own way; what a reader must know is in the text besides."""

    NONE = "none"
    BEST = "best"
    LOSSY = "lossy"
    MISSED = "missed"


_MARKS = {Emphasis.NONE: "", Emphasis.BEST: "**", Emphasis.LOSSY: "*", Emphasis.MISSED: "**"}
_LATEX = {Emphasis.NONE: "", Emphasis.BEST: r"\bfseries ", Emphasis.LOSSY: r"\itshape ", Emphasis.MISSED: r"\bfseries "}


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


@dataclass(frozen=True)
class Col:
    """A column: ``field`` of a row times ``scale`` in ``form``, with its interval in brackets where there is one.

    Attributes:
        heading: With the unit if there is one. It may hold line breaks; one behind a hyphen splits a word.
        field: A key or attribute of a row, a dash where it is None or NaN; or a function of the row.
        form: A format of Python, with a unit behind it: ``".2fx"``. ``"3"``: as many digits as count.
        align: A column of words is aligned to the left, and long cells are broken into lines.
        also: Another field, behind a semicolon.
        best: Where the row is the best in this field (``best.speedup``), the cell stands out.
        bounds: Whether the interval is shown.
        min_width: In characters, on a terminal.
    """

    heading: str
    field: str | Callable[[Any], Cell | str] = ""
    form: str = ".2f"
    scale: float = 1.0
    align: Literal["left", "right"] = "right"
    also: str | None = None
    best: bool = False
    bounds: bool = True
    min_width: int | None = None

    @property
    def title(self) -> str:
        """The heading on one line."""
        return " ".join(self.heading.replace("/\n", "/").replace("-\n", "").split())

    def cell(self, row: Any) -> Cell:
        """The cell of a row."""
        if callable(self.field):
            made = self.field(row)
            return Cell(made) if isinstance(made, str) else made
        text = self._text(value_of(row, self.field))
        if text == NOTHING:
            return Cell(NOTHING)
        if self.also is not None:
            text += f"; {self._text(value_of(row, self.also))}"
        ends = [value_of(row, f"{self.field}_{end}") for end in ("low", "high")] if self.bounds else [None]
        more = () if None in ends else (f"[{', '.join(self._text(end).removesuffix('x') for end in ends)}]",)
        leads = self.best and bool(value_of(row, f"best.{self.field}"))
        return Cell(text, more, emphasis=Emphasis.BEST if leads else Emphasis.NONE)

    def _text(self, value: Any) -> str:
        if value is None or value != value:
            return NOTHING
        if isinstance(value, str):
            return value
        scaled = value if self.scale == 1.0 else self.scale * value
        if self.form == "3" or (self.form.endswith((".0f", ".1f")) and 0 < scaled < 1):  # which would read as nothing
            return three_digits(scaled)
        return f"{scaled:{self.form.removesuffix('x')}}{'x' * self.form.endswith('x')}"


def value_of(row: Any, name: str) -> Any:
    """A key of a row, or an attribute of an object; None where there is none."""
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)


def words(heading: str, field: str | Callable[[Any], Cell | str] = "", **more: Any) -> Col:
    """A column of words."""
    return Col(heading, field, align="left", **more)


def three_digits(value: float | None) -> str:
    """A figure with as many digits as count, or a dash."""
    if value is None:
        return NOTHING
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}" if not 0 < value < 0.1 else f"{value:.2g}"


@dataclass
class Table:
    """Columns, rows, and what a reader has to know besides.

    Attributes:
        sections: Numbers of the rows after which a section ends.
    """

    columns: Sequence[Col]
    title: str = ""
    notes: Sequence[str] = ()
    rows: list[list[Cell]] = field(default_factory=list)
    sections: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        items: Sequence[Any],
        columns: Sequence[Col],
        *,
        title: str = "",
        notes: Sequence[str] = (),
        section: Callable[[Any], Any] | None = None,
    ) -> Self:
        """A row per item. Items for which ``section`` is equal stand in one section; None for no sections."""
        made = cls(columns, title, notes)
        keys = [section(item) for item in items] if section is not None else []
        for number, item in enumerate(items):
            ends = bool(keys) and (number + 1 == len(keys) or keys[number + 1] != keys[number])
            made.add(*(column.cell(item) for column in columns), end_section=ends)
        return made

    @classmethod
    def upright(
        cls,
        items: Sequence[Any],
        names: Sequence[str],
        lines: Sequence[Col],
        *,
        title: str = "",
        notes: Sequence[str] = (),
    ) -> Self:
        """A column per item, under its name, and a row per figure; a row that would say nothing is left out."""
        most = 16 if len(names) <= 6 else None  # a terminal has no room for more, and would cut the last columns
        made = cls([words("", min_width=most), *map(Col, names)], title, notes)
        for line in lines:
            cells = [line.cell(item) for item in items]
            if any(cell.line.strip(f"{NOTHING}; ") for cell in cells):
                made.add(line.heading, *cells)
        return made

    def add(self, *cells: Cell | str, end_section: bool = False) -> None:
        """Append a row; a text stands for a cell that is nothing more."""
        self.rows.append([Cell(cell) if isinstance(cell, str) else cell for cell in cells])
        if end_section:
            self.sections.add(len(self.rows) - 1)

    def markdown(self) -> str:
        """Columns and rows in GitHub's Markdown; title and notes are for the document around them to place."""
        rules = ["---:" if column.align == "right" else "---" for column in self.columns]
        lines = [
            " | ".join(column.title for column in self.columns),
            *(" | ".join(map(_in_markdown, row)) for row in self.rows),
        ]
        return "\n".join([f"| {lines[0]} |", f"|{'|'.join(rules)}|", *(f"| {line} |" for line in lines[1:])]) + "\n"

    def latex(self, label: str) -> str:
        r"""A ``table`` environment that needs ``booktabs`` and nothing else; title and notes are its caption."""
        caption = " ".join(f"{_in_latex(text.rstrip('.'))}." for text in (self.title, *self.notes) if text)
        lines = [
            " & ".join(_in_latex(column.title) for column in self.columns),
            *(" & ".join(_LATEX[cell.emphasis] + _in_latex(cell.line) for cell in row) for row in self.rows),
        ]
        head, *body = (rf"{line} \\" for line in lines)
        sides = "".join(column.align[0] for column in self.columns)
        opened = [r"% needs \usepackage{booktabs}", r"\begin{table}", r"\centering"]
        opened += [rf"\caption{{{caption}}}", rf"\label{{{label}}}", rf"\begin{{tabular}}{{{sides}}}", r"\toprule"]
        closed = [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
        return "\n".join([*opened, head, r"\midrule", *body, *closed]) + "\n"


_ESCAPED = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}",
    "\N{MULTIPLICATION SIGN}": r"$\times$", "\N{HORIZONTAL ELLIPSIS}": r"\ldots{}", "\N{MINUS SIGN}": "$-$",
    **{sign: rf"\{sign}" for sign in "{}$&#%_"},
}  # fmt: skip


def _in_latex(text: str) -> str:
    """A text that LaTeX prints as it is written; at the beginning of a line, brackets are no options of a command."""
    escaped = "".join(_ESCAPED.get(character, character) for character in " ".join(text.split()))
    return "{}" + escaped if escaped.startswith(("[", "*")) else escaped


def _in_markdown(cell: Cell) -> str:
    mark = _MARKS[cell.emphasis] if cell.line else ""
    return mark + " ".join(cell.line.split()).replace("|", "\\|") + mark  # a bar would end the cell
