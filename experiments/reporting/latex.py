r"""Tables for a paper: LaTeX with ``booktabs``, and no other package.

Everything that LaTeX would read as a command is escaped. Other letters stay as they are: pdfLaTeX prints those of
European languages, XeLaTeX and LuaLaTeX all that the font has.
"""

import re

from experiments.reporting.table import Cell, Column, Emphasis, Table

_ESCAPED = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{HORIZONTAL ELLIPSIS}": r"\ldots{}",
    "\N{EN DASH}": "--",
    "\N{EM DASH}": "---",
    "\N{MINUS SIGN}": "$-$",
    "\N{NO-BREAK SPACE}": "~",
}
_MARKS = {Emphasis.NONE: "{}", Emphasis.BEST: r"\textbf{{{}}}", Emphasis.LOSSY: r"\emph{{{}}}"}
_MARKS[Emphasis.MISSED] = _MARKS[Emphasis.BEST]


def render(table: Table, label: str) -> str:
    r"""A ``table`` environment; the table's title and notes are its caption.

    Args:
        table: The table.
        label: What ``\ref`` calls it.
    """
    kept = _telling(table)
    columns = [table.columns[number] for number in kept]
    lines = [
        r"% needs \usepackage{booktabs}; for a table across both columns write table* instead of table",
        r"\begin{table}",
        r"  \centering",
        r"  \footnotesize",
        r"  \setlength{\tabcolsep}{4pt}",
        rf"  \caption{{{_caption(table)}}}",
        rf"  \label{{{label}}}",
        r"  \smallskip",
        r"  \begin{tabular}{@{}" + "".join("r" if column.align == "right" else "l" for column in columns) + "@{}}",
        r"    \toprule",
        "    " + " & ".join(_heading(column) for column in columns) + r" \\",
        r"    \midrule",
    ]
    for number, row in enumerate(table.rows):
        lines.append("    " + " & ".join(_cell(row[column]) for column in kept) + r" \\")
        if number in table.sections and number + 1 < len(table.rows):
            lines.append(r"    \midrule")
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """A text that LaTeX prints as it is written."""
    escaped = "".join(_ESCAPED.get(character, character) for character in text)
    return " ".join(escaped.split())


def _telling(table: Table) -> list[int]:
    """Numbers of the columns in which any row says something: width is scarce on paper."""
    numbers = range(len(table.columns))
    return [number for number in numbers if any(row[number].line != "-" for row in table.rows) or not table.rows]


def _caption(table: Table) -> str:
    # A title may begin with a model's name, which has its own capitals.
    sentences = [table.title, *(note[:1].upper() + note[1:] for note in table.notes)]
    return " ".join(f"{escape(text)}." for text in sentences if text)


def _heading(column: Column) -> str:
    lines = [escape(line) for line in column.heading.splitlines()]
    return _stack(lines, "b", "r" if column.align == "right" else "l")


def _cell(cell: Cell) -> str:
    # A ratio's x is a sign, not a letter.
    text = "--" if cell.text == "-" else re.sub(r"^([\d.]+)x$", r"\1$\\times$", escape(cell.text))
    if text.startswith(("[", "*")):
        text = "{}" + text  # at the beginning of a line LaTeX takes them for options of the command that ended the last
    text, *more = (_minus(part) for part in (text, *(escape(part) for part in cell.more)))
    if cell.joint == " ":
        # An interval: beside its figure, and smaller.
        return " ".join([_MARKS[cell.emphasis].format(text), *(rf"{{\scriptsize {part}}}" for part in more)])
    # Settings, say: one below the other, because width is scarce.
    return _stack([_MARKS[cell.emphasis].format(text), *(rf"\scriptsize {part}" for part in more)], "t", "l")


def _minus(text: str) -> str:
    # A hyphen is shorter than a minus sign. The one of 1e-5 is part of a number as it was written.
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", text)


def _stack(lines: list[str], place: str, side: str) -> str:
    """Lines within one cell; ``place`` says which of them stands in the row's own line, the top or the bottom one."""
    if len(lines) < 2:
        return "".join(lines)
    return rf"\begin{{tabular}}[{place}]{{@{{}}{side}@{{}}}}" + r" \\ ".join(lines) + r"\end{tabular}"
