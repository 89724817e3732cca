"""A finished (or interrupted) run, read back from its folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.manifest import read_manifest
from experiments.records import RECORDS, read_records
from experiments.summary import Bootstrap, Summary, summarize

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Run:
    """What a run's folder holds.

    Attributes:
        folder: The folder.
        manifest: What made the results.
        summary: All figures, computed again from the records.
    """

    folder: Path
    manifest: dict[str, Any]
    summary: Summary


def load_run(folder: Path) -> Run:
    """Read a run.

    Raises:
        ValueError: The folder holds none, or none with a result, or one of another version.
    """
    manifest = read_manifest(folder)
    path = folder / RECORDS
    records = read_records(path) if path.is_file() else []
    if not records:
        raise ValueError(f"{folder} has no results: no prompt of that run has finished")
    try:
        summary = summarize(
            records,
            planned=manifest["planned"],
            groups=manifest["groups"],
            bootstrap=Bootstrap(**manifest["config"]["bootstrap"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder} was made by another version of this program: run it again ({error})") from error
    return Run(folder, manifest, summary)


def complete(folder: Path) -> bool:
    """The run has finished, and has reported it."""
    try:
        return bool(json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["complete"])
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return False
