"""Finished and interrupted runs, read back from their folders, one by one or all together as pandas frames."""

import glob
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pandas

from experiments.results import metrics
from experiments.results.frame import Frame, frame_of, rounds_of
from experiments.results.limits import Terms
from experiments.results.origin import MANIFEST, flatten, json_text, read_manifest
from experiments.results.records import PLAIN, RECORDS, read_records
from experiments.results.rows import ALL, PROMPTS, ROUNDS, RUNS, Row, rows_of, typed
from experiments.results.statistics import Bootstrap
from experiments.results.summary import SCHEMA, summarize

SUMMARY = "summary.json"
_FACTS = {
    **{name: name for name in ("dtype", "device", "threads", "prompts", "prompts_hash", "started")},
    "target": "target.name",
    "parameters": "target.parameters",
    "git_commit": "git.commit",
    "git_dirty": "git.dirty",
    "system": "machine.system",
    "processor": "machine.processor",
}
"""Columns of a run's origin, and where its manifest has them."""
Read = TypeVar("Read")


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder: its origin, its rows of the frame, and the outputs that they are of."""

    folder: Path
    manifest: dict[str, Any]
    frame: Frame = field(repr=False, compare=False)
    outputs: Frame = field(repr=False, compare=False)

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
            name = labels.get(row["method"], "plain decoding" if row["method"] == PLAIN else row["method"])
            row["label"] = row["label"].replace(row["method"], name, 1)
        return rows

    @cached_property
    def described(self) -> list[Row]:
        """The rows over all prompts with the columns that say what made the run."""
        return [row | _origin(self.folder, self.manifest) for row in self.rows]

    def parts_of(self, row: Row) -> list[Row]:
        """The rows by category of a row's method at its temperature."""
        return [part for part in self.parts if all(part[name] == row[name] for name in ("method", "temperature"))]

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

    def of(self, row: Row, method: str | None = None) -> Frame:
        """Return the outputs of a row's method, or of the method of another name, at the row's temperature."""
        same = self.outputs.temperature == row["temperature"]
        return self.outputs[same & (self.outputs.method == (method or row["method"]))]

    def write(self, title: str) -> Path:
        """Write ``summary.json``: the rows, and the title of the run's tables."""
        summary = {"schema": SCHEMA, "title": title, "complete": self.complete, "rows": rows_of(self.frame, None)}
        (self.folder / SUMMARY).write_text(json_text(summary), encoding="utf-8")
        return self.folder / SUMMARY


def load_run(folder: Path) -> Run:
    """Read a run. Raises ValueError: the folder holds none, or none with a result, or one of another version."""
    manifest = read_manifest(folder)
    records = read_records(folder / RECORDS) if (folder / RECORDS).is_file() else []
    if not records:
        raise ValueError(f"{folder} has no results: no prompt of that run has finished")
    outputs = frame_of(records, folder.as_posix())
    try:
        frame = summarize(
            outputs,
            planned=manifest["planned"],
            series=manifest["series"],
            bootstrap=Bootstrap(**manifest["config"]["bootstrap"]),
            terms=Terms.of(manifest["config"]),
            compared_with=manifest["config"].get("compared_with"),
            peaks=manifest.get("peaks"),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder} was made by another version of this program: run it again ({error})") from error
    return Run(folder, manifest, frame, outputs)


def read_summary(folder: Path) -> dict[str, Any]:
    """What a run has reported (``summary.json``); empty before its end, and where the file is damaged."""
    with suppress(OSError, ValueError):
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        return summary if isinstance(summary, dict) else {}
    return {}


def complete(folder: Path) -> bool:
    """The run has finished, and has reported it."""
    return bool(read_summary(folder).get("complete"))


# ---------------------------------------------------------------- which runs


def find_folders(given: Sequence[str]) -> list[Path]:
    """Return the folders of runs that some paths stand for, in order and each once.

    Paths are folders of runs, folders of sweeps (for all jobs that have begun), or glob patterns of either. A pattern
    that matches no folder is refused.
    """
    found: dict[Path, Path] = {}
    for text in given:
        jobs = runs_at(text)
        if not jobs and not Path(text).exists() and glob.has_magic(text):
            raise ValueError(f"no folder matches {text!r}: give folders of runs, or a pattern that matches some")
        for job in jobs or [Path(text)]:
            found.setdefault(job.resolve(), job)
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


# ---------------------------------------------------------------- many runs as frames


class Results:
    """The runs that ``load`` found, as frames. docs/measurements.md lists their columns.

    A frame is made when it is first asked for, so ``runs`` of thousands of folders reads no record as long as each
    run's ``summary.json`` is up to date.
    """

    def __init__(self, manifests: Mapping[Path, Mapping[str, Any]]):
        self.manifests = dict(manifests)

    def __repr__(self) -> str:
        return f"Results of {len(self.manifests)} runs: .runs, .prompts, .rounds"

    @cached_property
    def runs(self) -> Frame:
        """A row for every method at every temperature in every run, over all prompts."""
        return typed((row for row in self._rows if row["category"] == ALL), RUNS)

    @cached_property
    def categories(self) -> Frame:
        """The same by category of prompts, for runs that have several."""
        return typed((row for row in self._rows if row["category"] != ALL), RUNS)

    @cached_property
    def _rows(self) -> list[Row]:
        read = _readable(self.manifests, lambda folder: (folder, _rows(folder)))
        return [row | _origin(folder, self.manifests[folder]) for folder, rows in read for row in rows]

    @cached_property
    def prompts(self) -> Frame:
        """A row for every record: one output of one method."""
        sums = {name: lambda frame, name=name: frame[name].map(sum) for name in metrics.COLUMNS}
        return self._of_records(lambda frame: frame.assign(**sums, batch_seconds=frame.seconds), PROMPTS)

    @cached_property
    def rounds(self) -> Frame:
        """A row for every round of every output that did not fail."""
        return self._of_records(rounds_of, ROUNDS)

    def _of_records(self, view: Callable[[Frame], Frame], schema: Mapping[str, str]) -> Any:
        # One run's records at a time: all of them together may not fit into memory.
        def read(folder: Path) -> Frame:
            return view(frame_of(read_records(folder / RECORDS), folder.as_posix()))[list(schema)]

        frames = _readable(self.manifests, read)
        return typed(pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame(), schema)


def load(*patterns: str | os.PathLike[str]) -> Results:
    """Find runs and read what made them, in the order of the patterns, and job 10 of a sweep after job 9.

    Patterns are folders, for the run in it or all runs anywhere below it, or glob patterns such as ``outputs/**``.
    Folders that look like runs and cannot be read are left out, and one warning lists them.

    Raises:
        ValueError: There is no run at all.
    """

    def read(folder: Path) -> tuple[Path, Mapping[str, Any]]:
        manifest = read_manifest(folder)
        if not (folder / RECORDS).is_file():
            raise ValueError(f"{folder} has a manifest and no {RECORDS}: not a run, or one that never began")
        return folder, manifest

    folders = dict.fromkeys(folder for pattern in patterns for folder in runs_at(os.fspath(pattern)))
    manifests = dict(_readable(folders, read))
    if not manifests:
        given = ", ".join(repr(os.fspath(pattern)) for pattern in patterns) or "nothing"
        raise ValueError(f"no run found in {given}: give folders of runs, or a pattern such as 'outputs/**'")
    return Results(manifests)


def _readable(folders: Iterable[Path], read: Callable[[Path], Read]) -> list[Read]:
    """What was read from every folder; one warning lists those that cannot be read."""
    known, unreadable = [], []
    for folder in folders:
        try:
            known.append(read(folder))
        except (OSError, ValueError) as error:
            unreadable.append(f"\n  {folder}: {error}")
    if unreadable:
        warnings.warn(f"left out {len(unreadable)} folders that cannot be read:{''.join(unreadable)}", stacklevel=4)
    return known


def _rows(folder: Path) -> list[Row]:
    """A run's rows: from its summary if that is newer than its records, else computed from the records."""
    summary, file, records = read_summary(folder), folder / SUMMARY, folder / RECORDS
    # Another version's may lack a figure; the records have everything.
    if summary.get("schema") == SCHEMA and file.stat().st_mtime_ns >= records.stat().st_mtime_ns:
        return summary["rows"]
    return rows_of(load_run(folder).frame, None)


def _origin(folder: Path, manifest: Mapping[str, Any]) -> Row:
    """What made a run, from its manifest; what another version's manifest does not say is empty."""
    facts, given = flatten(manifest), [str(text) for text in manifest.get("overrides") or []]
    row = {column: facts.get(name) for column, name in _FACTS.items()}
    row |= {"run": folder.as_posix(), "overrides": " ".join(given)}
    row["gpus"] = ", ".join(facts.get("machine.gpus") or []) or None
    row |= {f"override.{text.partition('=')[0].lstrip('+~')}": text.partition("=")[2] for text in given if "=" in text}
    row |= {name.replace("versions.", "version.", 1): facts[name] for name in facts if name.startswith("versions.")}
    return row | {name: value for name, value in facts.items() if name.startswith("config.")}
