"""Finished and interrupted runs, read back from their folders."""

import glob
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.results.frame import Frame, frame_of
from experiments.results.limits import Terms
from experiments.results.origin import MANIFEST, json_text, read_manifest
from experiments.results.records import PLAIN, RECORDS, Record, read_records
from experiments.results.rows import ALL, Row, rows_of
from experiments.results.statistics import Bootstrap
from experiments.results.summary import SCHEMA, summarize

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Run:
    """What a run's folder holds: what made the results, its rows of the frame, computed from the records, and these.

    ``outputs`` is None for a run that was put together by hand.
    """

    folder: Path
    manifest: dict[str, Any]
    frame: Frame = field(repr=False, compare=False)
    outputs: Frame | None = field(default=None, repr=False, compare=False)

    @cached_property
    def rows(self) -> list[Row]:
        """A row per method and temperature, over all prompts."""
        return [row for row in self.all_rows if row["category"] == ALL]

    @cached_property
    def parts(self) -> list[Row]:
        """A row per category, method and temperature; none where there is one category."""
        return [row for row in self.all_rows if row["category"] != ALL]

    @cached_property
    def all_rows(self) -> list[Row]:
        """All rows, under the labels that the run's configuration has for methods."""
        rows, labels = rows_of(self.frame, None), self.manifest.get("config", {}).get("labels")
        for row in rows if labels else []:
            name = "plain decoding" if row["method"] == PLAIN else labels.get(row["method"], row["method"])
            row["label"] = row["label"].replace(row["method"], name, 1)
        return rows

    def parts_of(self, row: Row) -> list[Row]:
        """The rows by category of a row's method at its temperature."""
        key = (row["method"], row["temperature"])
        return [part for part in self.parts if (part["method"], part["temperature"]) == key]

    @property
    def complete(self) -> bool:
        """All planned prompts have finished."""
        return bool(self.rows) and self.rows[0]["complete"]

    @property
    def noisy(self) -> bool:
        """The machine disturbed the timings."""
        return bool(self.rows and self.rows[0]["noisy"])

    @property
    def not_lossless(self) -> list[str]:
        """The methods whose outputs are not lossless at some temperature."""
        return list(dict.fromkeys(row["method"] for row in self.rows if row["not_lossless"]))

    def of(self, row: Row, method: str | None = None) -> Frame | None:
        """Return the outputs of a row's method, or of the method of another name, at the row's temperature."""
        if self.outputs is None:
            return None
        wanted = row["method"] if method is None else method
        return self.outputs[(self.outputs.method == wanted) & (self.outputs.temperature == row["temperature"])]

    def write(self, title: str) -> Path:
        """Write ``summary.json``: the rows, and the title of the run's tables."""
        summary = {"schema": SCHEMA, "title": title, "complete": self.complete, "rows": rows_of(self.frame, None)}
        (self.folder / SUMMARY).write_text(json_text(summary), encoding="utf-8")
        return self.folder / SUMMARY


def load_run(folder: Path, *, width: float | None = None) -> Run:
    """Read a run. Raises ValueError: the folder holds none, or none with a result, or one of another version.

    ``width`` is the wanted one of intervals, in place of the run's own.
    """
    manifest = read_manifest(folder)
    outputs = frame_of(records_of(folder), folder.as_posix())
    try:
        frame = summarize(
            outputs,
            planned=manifest["planned"],
            series=manifest["series"],
            bootstrap=Bootstrap(**manifest["config"]["bootstrap"] | ({} if width is None else {"width": width})),
            terms=Terms.of(manifest["config"]),
            compared_with=manifest["config"].get("compared_with"),
            peaks=manifest.get("peaks"),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder} was made by another version of this program: run it again ({error})") from error
    return Run(folder, manifest, frame, outputs)


def records_of(folder: Path) -> list[Record]:
    """The records of a run."""
    records = read_records(folder / RECORDS) if (folder / RECORDS).is_file() else []
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
