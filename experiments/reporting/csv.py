"""Tables for a spreadsheet, as comma-separated values."""

import csv
import io

from experiments.reporting.table import Table


def render(table: Table) -> str:
    """A line of headings and a line per row, cells as they read on one line; without title, notes and emphasis."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.title for column in table.columns])
    writer.writerows([[" ".join(cell.line.split()) for cell in row] for row in table.rows])
    return text.getvalue()
