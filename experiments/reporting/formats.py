"""A report's table in the formats that its readers use."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.reporting import html_table, latex
from experiments.reporting.table import Table

if TYPE_CHECKING:
    import pandas

ENDINGS = {"md": "md", "csv": "csv", "latex": "tex", "html": "html", "parquet": "parquet"}
"""The formats, and how the names of their files end."""
FORMATS = tuple(ENDINGS)
USUAL = ("md", "csv")


def write_formats(
    formats: Sequence[str],
    out: Path,
    name: str,
    *,
    document: str,
    table: Table,
    figures: "Callable[[], pandas.DataFrame]",
) -> list[Path]:
    """Write a table in some formats, and return the files.

    Args:
        formats: Names of ``FORMATS``.
        out: The folder.
        name: Name of the files, without ending.
        document: The table in Markdown, with the sentences around it.
        table: The table for LaTeX and HTML, which show what is best.
        figures: Makes the figures behind the table, in full precision, for CSV and Parquet.
    """
    written = []
    for kind in dict.fromkeys(formats):
        path = out / f"{name}.{ENDINGS[kind]}"
        if kind == "parquet":
            figures().to_parquet(path, index=False)
        elif kind == "csv":
            figures().to_csv(path, index=False, lineterminator="\n")
        else:
            text = {
                "md": lambda: document,
                "latex": lambda: latex.render(table, f"tab:{name}"),
                "html": lambda: html_table.render(table),
            }[kind]()
            path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
