"""Finished and interrupted runs, read back from their folders."""

import glob
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.results.frame import Frame, frame_of
from experiments.results.limits import Terms
from experiments.results.origin import MANIFEST, read_manifest
from experiments.results.records import RECORDS, Record, read_records
from experiments.results.statistics import Bootstrap
from experiments.results.summary import MethodSummary, Summary, summarize

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Run:
    """What a run's folder holds: what made the results, all figures, computed again from the records, and these.

    The frame is None for a run that was put together by hand.
    """

    folder: Path
    manifest: dict[str, Any]
    summary: Summary
    frame: Frame | None = field(default=None, repr=False, compare=False)

    def of(self, method: MethodSummary, name: str | None = None) -> Frame | None:
        """Return the outputs of one of its methods, or of the one of another name, at the method's temperature."""
        if self.frame is None:
            return None
        wanted = method.method if name is None else name
        return self.frame[(self.frame.method == wanted) & (self.frame.temperature == method.temperature)]


def load_run(folder: Path, *, width: float | None = None) -> Run:
    """Read a run. Raises ValueError: the folder holds none, or none with a result, or one of another version.

    ``width`` is the wanted one of intervals, in place of the run's own.
    """
    manifest = read_manifest(folder)
    frame = frame_of(records_of(folder), folder.as_posix())
    try:
        summary = summarize(
            frame,
            planned=manifest["planned"],
            series=manifest["series"],
            bootstrap=Bootstrap(**manifest["config"]["bootstrap"] | ({} if width is None else {"width": width})),
            terms=Terms.of(manifest["config"]),
            compared_with=manifest["config"].get("compared_with"),
            peaks=manifest.get("peaks"),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder} was made by another version of this program: run it again ({error})") from error
    return Run(folder, manifest, summary, frame)


def records_of(folder: Path) -> list[Record]:
    """The records of a run."""
    path = folder / RECORDS
    records = read_records(path) if path.is_file() else []
    if not records:
        raise ValueError(f"{folder} has no results: no prompt of that run has finished")
    return records


def read_summary(folder: Path) -> dict[str, Any]:
    """What a run has reported (``summary.json``); empty before its end, and where the file is damaged."""
    try:
        found = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def complete(folder: Path) -> bool:
    """The run has finished, and has reported it."""
    return bool(read_summary(folder).get("complete"))


def find_folders(given: Sequence[str]) -> list[Path]:
    """Return the folders of runs that some paths stand for, in order and each once; those given twice are said.

    Args:
        given: Folders of runs; folders of sweeps, for all jobs that have begun; or glob patterns of either.

    Raises:
        ValueError: A pattern matches no folder.
    """
    found: dict[Path, Path] = {}
    twice: dict[Path, None] = {}
    for text in given:
        jobs = runs_at(text)
        if not jobs and not Path(text).exists() and glob.has_magic(text):
            raise ValueError(f"no folder matches {text!r}: give folders of runs, or a pattern that matches some")
        for job in jobs or [Path(text)]:
            if job.resolve() in found:
                twice[found[job.resolve()]] = None
            found.setdefault(job.resolve(), job)
    if twice:
        print(f"given more than once, and taken once: {', '.join(map(str, twice))}", file=sys.stderr)
    return list(found.values())


def runs_at(pattern: str) -> list[Path]:
    """Return the folders of all runs at or anywhere below a path, or below those that a pattern matches, by number."""
    exists = Path(pattern).exists() or not glob.has_magic(pattern)
    places = [Path(pattern)] if exists else map(Path, glob.glob(pattern, recursive=True))
    files = ([place / MANIFEST] if (place / MANIFEST).is_file() else place.rglob(MANIFEST) for place in places)
    found = {file.parent for listed in files for file in listed}
    return sorted(found, key=lambda path: [by_number(Path(part)) for part in path.parts])


def by_number(folder: Path) -> tuple[int, int, str]:
    """A key for sorting: job 10 after job 9, and other names after the numbers."""
    return (0, int(folder.name), "") if folder.name.isdigit() else (1, 0, folder.name)
