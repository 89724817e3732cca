"""One table for every report: what it says, apart from where it is shown.

A table is made once and rendered for a terminal (``terminal.py``), or here for a document, a spreadsheet, a paper and
the web. Commands make tables before anything heavy is loaded, so pandas is imported where a data frame is asked for.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, cast

if TYPE_CHECKING:
    import pandas
    from pandas.io.formats.style import Styler

Item = TypeVar("Item")
Contra = TypeVar("Contra", contravariant=True)
NOTHING = "-"
"""The text of a cell that has nothing to say."""


class Emphasis(Enum):
    """How a cell stands out. Every medium has its own way; what a reader must know is in the text besides."""

    NONE = "none"
    BEST = "best"
    LOSSY = "lossy"
    MISSED = "missed"


_MARKS = {Emphasis.NONE: "", Emphasis.BEST: "**", Emphasis.LOSSY: "*", Emphasis.MISSED: "**"}
_CSS = {
    Emphasis.NONE: "",
    Emphasis.BEST: "font-weight: bold",
    Emphasis.LOSSY: "font-style: italic",
    Emphasis.MISSED: "font-weight: bold; text-decoration: underline",
}
_PAGE: list[Any] = [
    {"selector": "", "props": "font: 14px/1.4 sans-serif; border-collapse: collapse"},
    {"selector": "caption", "props": "caption-side: top; text-align: left; padding-bottom: 8px"},
    {"selector": "th, td", "props": "padding: 3px 10px; border-bottom: 1px solid #8886; vertical-align: top"},
]
"""The looks of a table on the web; colours are the reader's own, light or dark."""


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


class ColumnOf(Protocol[Contra]):
    """A column that knows what it says of an item."""

    @property
    def column(self) -> Column: ...

    def cell(self, item: Contra, /) -> Cell: ...


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
        columns: Sequence["tuple[Column | str, Callable[[Item], Cell | str]] | ColumnOf[Item]"],
        *,
        title: str = "",
        notes: Sequence[str] = (),
        section: Callable[[Item], Any] | None = None,
    ) -> Self:
        """A row per item.

        Args:
            columns: Every column with what it says of an item, or both as one (``columns.Col``); a text is the heading
                of a column of figures.
            section: Items for which this is equal stand in one section; None for a table without sections.
        """
        pairs = [each if isinstance(each, tuple) else (each.column, each.cell) for each in columns]
        made = cls([Column(name) if isinstance(name, str) else name for name, _ in pairs], title, notes)
        keys = [section(item) for item in items] if section is not None else []
        for number, item in enumerate(items):
            ends = bool(keys) and (number + 1 == len(keys) or keys[number + 1] != keys[number])
            made.add(*(cell(item) for _, cell in pairs), end_section=ends)
        return made

    @classmethod
    def upright(
        cls,
        items: Sequence[Item],
        names: Iterable[str],
        lines: Iterable["tuple[str, Callable[[Item], Cell | str]] | ColumnOf[Item]"],
        *,
        title: str = "",
        notes: Sequence[str] = (),
    ) -> Self:
        """A column per item, under its name, and a row per figure: ``lines`` has the row's name and its cells.

        A row that would say nothing of any item is left out.
        """
        made = cls([Column("", "left"), *map(Column, names)], title, notes)
        for line in lines:
            name, cell = line if isinstance(line, tuple) else (line.column.heading, line.cell)
            cells = [said if isinstance(said, Cell) else Cell(said) for said in map(cell, items)]
            if any(said.line.strip(f"{NOTHING}; ") for said in cells):
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

    def latex(self, label: str) -> str:
        r"""A ``table`` environment that needs ``booktabs`` and nothing else; title and notes are its caption."""
        made = self._styler(_in_latex).to_latex(
            hrules=True,
            convert_css=True,
            caption=" ".join(f"{_in_latex(text.rstrip('.'))}." for text in (self.title, *self.notes) if text),
            label=label,
            position_float="centering",
            column_format="".join(column.align[0] for column in self.columns),
        )
        return "% needs \\usepackage{booktabs}\n" + made

    def html(self) -> str:
        """One web page that needs nothing else: no script, no network, the reader's own colours."""
        from html import escape

        sides: list[Any] = [
            {"selector": f".col{number}", "props": f"text-align: {column.align}"}
            for number, column in enumerate(self.columns)
        ]
        caption = "<br>".join(escape(text) for text in (self.title, *self.notes) if text)
        styler = self._styler(escape).set_table_styles([*_PAGE, *sides]).set_caption(caption)
        dark = '<meta name="color-scheme" content="light dark"><meta name="viewport" content="width=device-width">'
        return styler.to_html(doctype_html=True).replace("<head>", f"<head>\n{dark}", 1)

    def _styler(self, escape: Callable[[str], str]) -> "Styler":
        """The data frame with emphasis; headings and cells are escaped."""
        import pandas

        frame = self.frame()
        # Columns are told apart by their names: one that stands twice is followed by spaces.
        names = [escape(name) for name in frame.columns]
        frame.columns = [f"{name}{' ' * names[:number].count(name)}" for number, name in enumerate(names)]
        looks = pandas.DataFrame([[_CSS[cell.emphasis] for cell in row] for row in self.rows], columns=frame.columns)
        return cast("Styler", frame.style.hide(axis="index").apply(lambda _: looks, axis=None).format(escape))


_ESCAPED = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{HORIZONTAL ELLIPSIS}": r"\ldots{}",
    "\N{MINUS SIGN}": "$-$",
    **{sign: rf"\{sign}" for sign in "{}$&#%_"},
}


def _in_latex(text: str) -> str:
    """A text that LaTeX prints as it is written; at the beginning of a line, brackets are no options of a command."""
    escaped = "".join(_ESCAPED.get(character, character) for character in text)
    return "{}" + escaped if escaped.startswith(("[", "*")) else escaped


def _bars(entries: Iterable[str]) -> str:
    return "| " + " | ".join(entries) + " |"


def _in_markdown(cell: Cell) -> str:
    mark = _MARKS[cell.emphasis] if cell.line else ""
    # A bar would end the cell.
    return mark + " ".join(cell.line.split()).replace("|", "\\|") + mark
