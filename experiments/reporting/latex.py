r"""Tables for a paper: LaTeX with ``booktabs``, and no other package.

Everything that LaTeX would read as a command is escaped. Other letters stay as they are: pdfLaTeX prints those of
European languages, XeLaTeX and LuaLaTeX all that the font has.
"""

import re

from experiments.reporting.table import Cell, Column, Emphasis, Table

_NAMED = {
    "\\": "backslash", "^": "asciicircum", "~": "asciitilde", "<": "less", ">": "greater", "|": "bar",
    '"': "quotedbl", "`": "asciigrave",
}  # fmt: skip
_ESCAPED = (
    {sign: rf"\{sign}" for sign in "{}$&#%_"}
    | {sign: rf"\text{name}{{}}" for sign, name in _NAMED.items()}
    | {"\N{MULTIPLICATION SIGN}": r"$\times$", "\N{HORIZONTAL ELLIPSIS}": r"\ldots{}", "\N{EN DASH}": "--"}
    | {"\N{EM DASH}": "---", "\N{MINUS SIGN}": "$-$", "\N{NO-BREAK SPACE}": "~"}
)
_MARKS = {
    Emphasis.NONE: "{}",
    Emphasis.BEST: r"\textbf{{{}}}",
    Emphasis.LOSSY: r"\emph{{{}}}",
    Emphasis.MISSED: r"\textbf{{{}}}",
}


def render(table: Table, label: str) -> str:
    r"""A ``table`` environment; the table's title and notes are its caption."""
    # Width is scarce on paper: a column in which no row says anything is left out.
    numbers = range(len(table.columns))
    kept = [number for number in numbers if not table.rows or any(row[number].line != "-" for row in table.rows)]
    columns = [table.columns[number] for number in kept]
    # A title may begin with a model's name, which has its own capitals.
    caption = [table.title, *(note[:1].upper() + note[1:] for note in table.notes)]
    lines = [
        r"% needs \usepackage{booktabs}; for a table across both columns write table* instead of table",
        r"\begin{table}",
        r"  \centering",
        r"  \footnotesize",
        r"  \setlength{\tabcolsep}{4pt}",
        rf"  \caption{{{' '.join(f'{escape(text)}.' for text in caption if text)}}}",
        rf"  \label{{{label}}}",
        r"  \smallskip",
        r"  \begin{tabular}{@{}" + "".join(column.align[0] for column in columns) + "@{}}",
        r"    \toprule",
        "    " + " & ".join(map(_heading, columns)) + r" \\",
        r"    \midrule",
    ]
    for number, row in enumerate(table.rows):
        lines.append("    " + " & ".join(_cell(row[column]) for column in kept) + r" \\")
        if number in table.sections and number + 1 < len(table.rows):
            lines.append(r"    \midrule")
    return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]) + "\n"


def escape(text: str) -> str:
    """A text that LaTeX prints as it is written."""
    return " ".join("".join(_ESCAPED.get(character, character) for character in text).split())


def _heading(column: Column) -> str:
    return _stack([escape(line) for line in column.heading.splitlines()], "b", column.align[0])


def _cell(cell: Cell) -> str:
    # A ratio's x is a sign, not a letter.
    text = "--" if cell.text == "-" else re.sub(r"^([\d.]+)x$", r"\1$\\times$", escape(cell.text))
    if text.startswith(("[", "*")):
        text = "{}" + text  # at the beginning of a line LaTeX takes them for options of the command that ended the last
    # A hyphen is shorter than a minus sign. The one of 1e-5 is part of a number as it was written.
    text, *more = (re.sub(r"(?<![\w-])-(?=\d)", "$-$", part) for part in (text, *map(escape, cell.more)))
    text = _MARKS[cell.emphasis].format(text)
    if cell.joint == " ":
        return " ".join([text, *(rf"{{\scriptsize {part}}}" for part in more)])  # an interval, beside its figure
    return _stack([text, *(rf"\scriptsize {part}" for part in more)], "t", "l")  # settings, one below the other


def _stack(lines: list[str], place: str, side: str) -> str:
    """Lines within one cell; ``place`` says which of them stands in the row's own line, the top or the bottom one."""
    if len(lines) < 2:
        return "".join(lines)
    return rf"\begin{{tabular}}[{place}]{{@{{}}{side}@{{}}}}" + r" \\ ".join(lines) + r"\end{tabular}"
