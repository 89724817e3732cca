"""Results as data: pandas frames over any number of runs, for analyses that no table here foresees.

``load("outputs/**")`` looks for runs and reads their manifests. A frame is made when it is first asked for, so
``runs`` of thousands of folders reads no record as long as each run's ``summary.json`` is up to date.
"""

import glob
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas

from experiments.results import schema
from experiments.results.frames import frame, method_columns, origin_columns, prompt_columns, round_columns
from experiments.results.origin import MANIFEST, read_manifest
from experiments.results.records import RECORDS, Record, read_records
from experiments.results.runs import SUMMARY, by_number, load_run
from experiments.results.summary import MethodSummary

_KEPT = {field.name for field in fields(MethodSummary)}


class Results:
    """The runs that ``load`` found, as three frames. docs/results-data.md lists their columns.

    Args:
        manifests: The manifest of every run, by its folder.
    """

    def __init__(self, manifests: Mapping[Path, Mapping[str, Any]]):
        self.manifests = dict(manifests)

    def __repr__(self) -> str:
        return f"Results of {len(self.manifests)} runs: .runs, .prompts, .rounds"

    def __len__(self) -> int:
        return len(self.manifests)

    def only(self, runs: Iterable[str]) -> "Results":
        """These runs alone, by their names in the frames' column ``run``.

        Raises:
            ValueError: There is no run of such a name.
        """
        wanted = dict.fromkeys(str(run) for run in runs)
        known = {folder.as_posix(): folder for folder in self.manifests}
        for name in wanted:
            if name not in known:
                raise ValueError(f"there is no run {name!r} among these {len(known)}: take names from runs.run")
        return Results({known[name]: self.manifests[known[name]] for name in wanted})

    @cached_property
    def runs(self) -> pandas.DataFrame:
        """A row for every method at every temperature in every run."""
        rows: list[dict[str, Any]] = []
        unreadable: dict[Path, str] = {}
        for folder, manifest in self.manifests.items():
            try:
                summary = _summary(folder)
            except (OSError, ValueError) as error:
                unreadable[folder] = str(error)
                continue
            origin = origin_columns(folder, manifest)
            rows += [method_columns(summary, method) | origin for method in summary["methods"]]
        _warn(unreadable)
        return frame(rows, schema.RUNS)

    @cached_property
    def prompts(self) -> pandas.DataFrame:
        """A row for every record: one output of one method."""
        return frame((prompt_columns(run, record) for run, record in self._records()), schema.PROMPTS)

    @cached_property
    def rounds(self) -> pandas.DataFrame:
        """A row for every round of every output that did not fail."""
        columns: dict[str, list[Any]] = {name: [] for name in schema.ROUNDS}
        for run, record in self._records():
            if not record.failed:
                for name, values in round_columns(run, record).items():
                    columns[name] += values
        return frame(columns, schema.ROUNDS)

    def _records(self) -> Iterable[tuple[str, Record]]:
        unreadable: dict[Path, str] = {}
        for folder in self.manifests:
            try:
                # One run's records at a time: all of them together may not fit into memory.
                for record in read_records(folder / RECORDS):
                    yield folder.as_posix(), record
            except (OSError, ValueError) as error:
                unreadable[folder] = str(error)
        _warn(unreadable)


def load(*patterns: str | os.PathLike[str]) -> Results:
    """Find runs and read what made them.

    Args:
        patterns: Folders, for the run in it or all runs anywhere below it; or glob patterns such as ``outputs/**``.

    Returns:
        The runs, in the order of the patterns, and job 10 of a sweep after job 9. Folders that look like runs and
        cannot be read are left out, and one warning lists them.

    Raises:
        ValueError: There is no run at all.
    """
    manifests: dict[Path, Mapping[str, Any]] = {}
    unreadable: dict[Path, str] = {}
    for folder in _folders([os.fspath(pattern) for pattern in patterns]):
        try:
            manifest = read_manifest(folder)
            if not (folder / RECORDS).is_file():
                raise ValueError(f"{folder} has a manifest and no {RECORDS}: not a run, or one that never began")
            manifests[folder] = manifest
        except (OSError, ValueError) as error:
            unreadable[folder] = str(error)
    _warn(unreadable)
    if not manifests:
        given = ", ".join(repr(os.fspath(pattern)) for pattern in patterns) or "nothing"
        raise ValueError(f"no run found in {given}: give folders of runs, or a pattern such as 'outputs/**'")
    return Results(manifests)


def _folders(patterns: Iterable[str]) -> list[Path]:
    found: dict[Path, None] = {}
    for pattern in patterns:
        literal = Path(pattern).exists() or not glob.has_magic(pattern)
        places = [pattern] if literal else glob.glob(pattern, recursive=True)
        below = [path.parent for place in places for path in _manifests(Path(place), deep=literal)]
        found |= dict.fromkeys(sorted(below, key=lambda path: [by_number(each) for each in _steps(path)]))
    return list(found)


def _manifests(place: Path, *, deep: bool) -> Iterable[Path]:
    # `outputs/**` has every folder already; one that was named stands for all below it.
    if (place / MANIFEST).is_file():
        return [place / MANIFEST]
    return place.rglob(MANIFEST) if deep and place.is_dir() else []


def _steps(path: Path) -> list[Path]:
    return [Path(part) for part in path.parts]


def _warn(unreadable: Mapping[Path, str]) -> None:
    if unreadable:
        listed = "\n".join(f"  {folder}: {reason}" for folder, reason in unreadable.items())
        warnings.warn(f"left out {len(unreadable)} folders that cannot be read:\n{listed}", stacklevel=3)


def _summary(folder: Path) -> dict[str, Any]:
    """A run's figures: from its summary if that is newer than its records, else computed from the records."""
    path = folder / SUMMARY
    try:
        if path.stat().st_mtime_ns >= (folder / RECORDS).stat().st_mtime_ns:
            summary = json.loads(path.read_text(encoding="utf-8"))
            # An older version's summary may lack a figure; the records have everything.
            if all(method.keys() >= _KEPT for method in summary["methods"]):
                return summary
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        pass  # never written, or cut short: the records decide
    return asdict(load_run(folder).summary)
