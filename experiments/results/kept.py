"""A file of JSON lines that grows with every step of a measurement, so that Ctrl-C or a crash loses no step."""

import json
from pathlib import Path
from typing import Any

from experiments.results.origin import Figures


def kept_rows(file: Path) -> list[Figures]:
    """The rows that an earlier attempt has left; a last one that was cut off is taken out of the file, too."""
    if not file.exists():
        return []
    written = file.read_bytes()
    whole = written[: written.rfind(b"\n") + 1]
    if len(whole) < len(written):
        file.write_bytes(whole)
    return [json.loads(line, object_hook=Figures) for line in whole.splitlines()]


def keep_row(file: Path, row: dict[str, Any]) -> None:
    """Append a row."""
    with file.open("a", encoding="utf-8", newline="\n") as stream:
        stream.write(json.dumps(row) + "\n")
