"""What reports leave: tables and sentences on the terminal, documents, figures, and tables in many formats."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.reporting.table import Table
from experiments.results.origin import json_text

if TYPE_CHECKING:
    import pandas

ENDINGS = {"md": "md", "csv": "csv", "latex": "tex", "parquet": "parquet"}
"""The formats of tables, and how the names of their files end."""
FORMATS = (*ENDINGS, "html")
USUAL = ("md", "csv")


def publish(
    out: Path,
    name: str,
    *,
    tables: Sequence[Table],
    figures: Mapping[str, Any] | None = None,
    document: str = "",
    said: Sequence[str] = (),
    more: Mapping[str, str] | None = None,
    drawn: Callable[[], Iterable[Path]] = tuple,
) -> list[Path]:
    """Print tables and sentences, write a report's files, list these, and return them.

    ``figures`` become JSON, and ``document`` is the report in Markdown (empty for none); ``more`` has further texts, by
    the names of their files; ``drawn`` makes pictures and other files when the texts are written.
    """
    from experiments.reporting import terminal  # it imports rich, and settings only want the names of the formats

    console = terminal.console()
    terminal.show(console, *tables)
    terminal.say(console, *said)
    texts = {f"{name}.md": document, f"{name}.json": figures, **(more or {})}
    written = [*write_texts(out, {file: text for file, text in texts.items() if text}), *drawn()]
    terminal.list_written(console, written)
    return written


def write_formats(
    formats: Sequence[str], out: Path, name: str, *, document: str, table: Table, figures: "pandas.DataFrame"
) -> list[Path]:
    """Write a table in some formats, and return the files.

    ``document`` has the table in Markdown with the sentences around it; ``table`` is for LaTeX, which shows what
    is best; ``figures`` are those behind it in full precision, for CSV and Parquet.
    """
    made: dict[str, Callable[[Path], object]] = {
        "md": lambda path: path.write_text(document, encoding="utf-8"),
        "latex": lambda path: path.write_text(table.latex(f"tab:{name}"), encoding="utf-8"),
        "csv": lambda path: figures.to_csv(path, index=False, lineterminator="\n"),
        "parquet": lambda path: figures.to_parquet(path, index=False),
    }
    paths = {kind: out / f"{name}.{ENDINGS[kind]}" for kind in formats if kind in ENDINGS}
    for kind, path in paths.items():
        made[kind](path)
    return list(paths.values())


def csv_text(frame: "pandas.DataFrame") -> str:
    """A frame for a spreadsheet, with six digits."""
    return frame.to_csv(index=False, lineterminator="\n", float_format="%.6g")


def write_texts(folder: Path, texts: Mapping[str, str | Mapping[str, Any]]) -> list[Path]:
    """Write texts, and figures as JSON, into a folder, by the names of their files, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text if isinstance(text, str) else json_text(text), encoding="utf-8")
    return [folder / name for name in texts]


def document(*parts: str | Table | Iterable[str]) -> str:
    """A Markdown document: paragraphs, tables, and lists of sentences, with a line between them."""
    pieces = []
    for part in parts:
        if isinstance(part, Table):
            pieces.append(part.markdown().rstrip())
        else:
            pieces.append(part if isinstance(part, str) else "\n".join(f"- {line}" for line in part))
    return "\n\n".join(piece for piece in pieces if piece) + "\n"
