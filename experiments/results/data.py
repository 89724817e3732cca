"""Results as data: pandas frames over any number of runs, for analyses that no table here foresees.

``load("outputs/**")`` looks for runs and reads their manifests. A frame is made when it is first asked for, so
``runs`` of thousands of folders reads no record as long as each run's ``summary.json`` is up to date.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pandas

from experiments.results import metrics
from experiments.results.frame import Frame, frame_of, rounds_of
from experiments.results.origin import flatten, read_manifest
from experiments.results.records import RECORDS, read_records
from experiments.results.rows import ALL, RUNS, Row, columns, rows_of, typed
from experiments.results.runs import SUMMARY, Run, load_run, read_summary, runs_at
from experiments.results.summary import SCHEMA

Read = TypeVar("Read")


PROMPTS = columns("""\
category: run method exactness
float64: temperature
string: prompt
category: category
int64: turn sample batch prompt_tokens tokens rounds accepted
float64: expected_accepted
int64: proposed_depth proposed_nodes
float64: mean_acceptance_length batch_seconds ingestion arrived admitted prefilled first_token finished
float64: ttft engine_ttft tpot e2e
category: finish_reason
bool: failed
string: error
boolean: equals_plain
Int64: divergence
float64: margin tie_bound
string: text
""")

ROUNDS = columns("""\
category: run method
float64: temperature
category: prompt category
int64: turn sample round accepted
float64: expected_accepted
int64: proposed_depth proposed_nodes
float64: distance_tv distance_kl emitted_at
Int64: emitted
""")


class Results:
    """The runs that ``load`` found, as three frames. docs/measurements.md lists their columns."""

    def __init__(self, manifests: Mapping[Path, Mapping[str, Any]]):
        self.manifests = dict(manifests)

    def __repr__(self) -> str:
        return f"Results of {len(self.manifests)} runs: .runs, .prompts, .rounds"

    def __len__(self) -> int:
        return len(self.manifests)

    def only(self, runs: Iterable[str]) -> "Results":
        """Return these runs alone, by their names in the frames' column ``run``."""
        wanted = dict.fromkeys(str(run) for run in runs)
        known = {folder.as_posix(): folder for folder in self.manifests}
        for name in wanted:
            if name not in known:
                raise ValueError(f"there is no run {name!r} among these {len(known)}: take names from runs.run")
        return Results({known[name]: self.manifests[known[name]] for name in wanted})

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
        def read(folder: Path) -> list[Row]:
            origin = _origin(folder, self.manifests[folder])
            return [row | origin for row in _rows(folder)]

        return [row for rows in _readable(self.manifests, read) for row in rows]

    @cached_property
    def prompts(self) -> Frame:
        """A row for every record: one output of one method."""
        return self._of_records(_prompts, PROMPTS)

    @cached_property
    def rounds(self) -> Frame:
        """A row for every round of every output that did not fail."""
        return self._of_records(rounds_of, ROUNDS)

    def _of_records(self, view: Callable[[Frame], Frame], schema: Mapping[str, str]) -> Any:
        # One run's records at a time: all of them together may not fit into memory.
        def read(folder: Path) -> Frame:
            found = view(frame_of(read_records(folder / RECORDS), folder.as_posix()))
            return found[list(schema)].astype({name: "object" for name in schema if schema[name] == "category"})

        found = _readable(self.manifests, read)
        return typed(pandas.concat(found, ignore_index=True) if found else pandas.DataFrame(), schema)


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
    found, unreadable = [], {}
    for folder in folders:
        try:
            found.append(read(folder))
        except (OSError, ValueError) as error:
            unreadable[folder] = str(error)
    if unreadable:
        listed = "\n".join(f"  {folder}: {reason}" for folder, reason in unreadable.items())
        warnings.warn(f"left out {len(unreadable)} folders that cannot be read:\n{listed}", stacklevel=4)
    return found


def _rows(folder: Path) -> list[Row]:
    """A run's rows: from its summary if that is newer than its records, else computed from the records."""
    summary, file, records = read_summary(folder), folder / SUMMARY, folder / RECORDS
    # Another version's may lack a figure; the records have everything.
    if summary.get("schema") == SCHEMA and file.stat().st_mtime_ns >= records.stat().st_mtime_ns:
        return summary["rows"]
    return rows_of(load_run(folder).frame, None)


def _prompts(frame: Frame) -> Frame:
    sums = {name: frame[name].map(sum) for name in metrics.COLUMNS}
    length = (1 + sums["accepted"] / frame.rounds).where(frame.rounds > 0)
    return frame.assign(**sums, mean_acceptance_length=length, batch_seconds=frame.seconds)


def described(run: Run) -> list[Row]:
    """Return a run's rows with the columns that say what made it."""
    return [row | _origin(run.folder, run.manifest) for row in run.rows]


def _origin(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What made a run, from its manifest; what another version's manifest does not say is empty."""
    machine, git, target = (manifest.get(name) or {} for name in ("machine", "git", "target"))
    given = [str(text) for text in manifest.get("overrides") or []]
    row = {
        "run": folder.as_posix(),
        "target": target.get("name"),
        "parameters": target.get("parameters"),
        **{name: manifest.get(name) for name in ("dtype", "device", "threads", "prompts", "prompts_hash", "started")},
        "system": machine.get("system"),
        "processor": machine.get("processor"),
        "gpus": ", ".join(machine.get("gpus") or []) or None,
        "git_commit": git.get("commit"),
        "git_dirty": git.get("dirty"),
        "overrides": " ".join(given),
    }
    row |= {f"version.{name}": version for name, version in (manifest.get("versions") or {}).items()}
    for name, assigned, value in (text.partition("=") for text in given):
        if assigned:
            row[f"override.{name.lstrip('+~')}"] = value
    return row | {f"config.{name}": value for name, value in flatten(manifest["config"]).items()}
