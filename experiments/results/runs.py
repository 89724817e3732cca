"""Finished and interrupted runs, read back from their folders."""

import glob
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.results.frame import Frame, frame_of
from experiments.results.limits import Terms
from experiments.results.origin import MANIFEST, read_manifest
from experiments.results.records import PLAIN, RECORDS, Record, read_records
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

    def plain(self, method: MethodSummary) -> Frame | None:
        """Return plain decoding's outputs, at the method's temperature."""
        return self.of(method, PLAIN)


def load_run(folder: Path) -> Run:
    """Read a run.

    Raises:
        ValueError: The folder holds none, or none with a result, or one of another version.
    """
    manifest = read_manifest(folder)
    frame = frame_of(records_of(folder), folder.as_posix())
    try:
        summary = summarize(
            frame,
            planned=manifest["planned"],
            series=manifest["series"],
            bootstrap=Bootstrap(**manifest["config"]["bootstrap"]),
            terms=Terms.of(manifest["config"]),
            compared_with=manifest["config"].get("compared_with"),
            peaks=manifest.get("peaks"),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder} was made by another version of this program: run it again ({error})") from error
    return Run(folder, manifest, summary, frame)


def records_of(folder: Path) -> list[Record]:
    """The records of a run.

    Raises:
        ValueError: There are none, or a line is not a record.
    """
    path = folder / RECORDS
    records = read_records(path) if path.is_file() else []
    if not records:
        raise ValueError(f"{folder} has no results: no prompt of that run has finished")
    return records


def complete(folder: Path) -> bool:
    """The run has finished, and has reported it."""
    try:
        return bool(json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["complete"])
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return False


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
        folders = [Path(text)]
        if not folders[0].exists() and glob.has_magic(text):
            folders = [path for path in map(Path, glob.glob(text, recursive=True)) if path.is_dir()]
            if not folders:
                raise ValueError(f"no folder matches {text!r}: give folders of runs, or a pattern that matches some")
        for job in (job for folder in sorted(folders, key=by_number) for job in jobs_of(folder)):
            if job.resolve() in found:
                twice[found[job.resolve()]] = None
            found.setdefault(job.resolve(), job)
    if twice:
        print(f"given more than once, and taken once: {', '.join(map(str, twice))}", file=sys.stderr)
    return list(found.values())


def folders_below(patterns: Iterable[str]) -> list[Path]:
    """Return the folders of all runs at or anywhere below some paths, and those that patterns match, each once."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        deep = Path(pattern).exists() or not glob.has_magic(pattern)  # `outputs/**` has every folder already
        places = [Path(pattern)] if deep else map(Path, glob.glob(pattern, recursive=True))
        below = [file.parent for place in places for file in _manifests(place, deep=deep)]
        found |= dict.fromkeys(sorted(below, key=lambda path: [by_number(Path(part)) for part in path.parts]))
    return list(found)


def _manifests(place: Path, *, deep: bool) -> Iterable[Path]:
    if (place / MANIFEST).is_file():
        return [place / MANIFEST]
    return place.rglob(MANIFEST) if deep and place.is_dir() else []


def jobs_of(folder: Path) -> list[Path]:
    """The folder itself, or those of a sweep's jobs that have begun."""
    jobs = [path.parent for path in folder.glob(f"*/{MANIFEST}")] if not (folder / MANIFEST).exists() else []
    return sorted(jobs, key=by_number) or [folder]


def by_number(folder: Path) -> tuple[int, int, str]:
    """A key for sorting: job 10 after job 9, and other names after the numbers."""
    return (0, int(folder.name), "") if folder.name.isdigit() else (1, 0, folder.name)
