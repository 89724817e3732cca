"""Tables for a document, in GitHub's Markdown."""

from experiments.reporting.table import Cell, Emphasis, Table

_MARKS = {Emphasis.NONE: "", Emphasis.BEST: "**", Emphasis.LOSSY: "*", Emphasis.MISSED: "**"}


def render(table: Table) -> str:
    """The table's columns and rows; title and notes are for the document around it to place."""
    lines = [
        _line([column.title for column in table.columns]),
        "|" + "|".join("---:" if column.align == "right" else "---" for column in table.columns) + "|",
    ]
    lines += [_line([_cell(cell) for cell in row]) for row in table.rows]
    return "\n".join(lines) + "\n"


def _cell(cell: Cell) -> str:
    mark = _MARKS[cell.emphasis] if cell.line else ""
    # A bar would end the cell.
    return mark + " ".join(cell.line.split()).replace("|", "\\|") + mark


def _line(entries: list[str]) -> str:
    return "| " + " | ".join(entries) + " |"
