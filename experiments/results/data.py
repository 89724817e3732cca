"""Results as data: pandas frames over any number of runs, for analyses that no table here foresees.

``load("outputs/**")`` looks for runs and reads their manifests. A frame is made when it is first asked for, so
``runs`` of thousands of folders reads no record as long as each run's ``summary.json`` is up to date.
"""

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import pandas

from experiments.results import metrics
from experiments.results.frame import Frame, frame_of, rounds_of
from experiments.results.origin import flatten, read_manifest
from experiments.results.records import RECORDS, read_records
from experiments.results.runs import SUMMARY, by_number, load_run, read_summary, runs_at
from experiments.results.summary import SCHEMA

Read = TypeVar("Read")


def _columns(text: str) -> dict[str, str]:
    """Columns by name, from lines of a type and the columns of that type, in the frame's order."""
    lines = (line.partition(": ") for line in text.strip().splitlines())
    return {name: kind for kind, _, names in lines for name in names.split()}


# The columns of the frames and their types; docs/measurements.md says what they mean. A name with ``*`` stands for as
# many columns as the runs have: one per position of the draft, package or setting.
RUNS = _columns("""\
string: run method exactness
float64: temperature
bool: complete
int64: planned finished failed tokens rounds
float64: confidence mean_acceptance_length mean_acceptance_length_low mean_acceptance_length_high
Int64: prompts_needed
float64: expected_mean_acceptance_length draft_acceptance_rate proposed_depth_per_round proposed_nodes_per_round
float64: distance_tv distance_tv_low distance_tv_high distance_kl noise_spread other_cores
boolean: noisy
int64: timed_prompts
float64: seconds tokens_per_second speedup speedup_low speedup_high distinct_4_gram_rate
float64: wasted useful_mfu predicted_error
float64: requests_per_second total_tokens_per_second user_tokens_per_second concurrency waiting attainment goodput
float64: device_hours_per_million_tokens price_per_million_tokens joules_per_token
Int64: equal_to_plain compared_with_plain
string: lossless
Int64: divergences unexplained
float64: largest_margin tie_bound
string: target
Int64: parameters
string: dtype device
Int64: threads
string: system processor gpus
Int64: prompts
string: prompts_hash
datetime64[us, UTC]: started
string: git_commit
boolean: git_dirty
string: overrides
float64: stage_seconds.* mbu.* mfu.*
float64: ttft.* engine_ttft.* queue.* tpot.* chunk_gap.* token_gap.* e2e.* phase_share.* stage_share.*
Int64: finish.*
float64: acceptance_at.* acceptance_low_at.* acceptance_high_at.*
float64: conditional_acceptance_at.* conditional_acceptance_low_at.* conditional_acceptance_high_at.*
Int64: rounds_at.*
string: version.* override.*
any: config.*
""")

PROMPTS = _columns("""\
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

ROUNDS = _columns("""\
category: run method
float64: temperature
category: prompt category
int64: turn sample round accepted
float64: expected_accepted
int64: proposed_depth proposed_nodes
float64: distance_tv distance_kl seconds predicted_seconds emitted_at
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
        """A row for every method at every temperature in every run."""
        found = _readable(self.manifests, lambda folder: method_rows(_summary(folder), folder, self.manifests[folder]))
        return typed(pandas.DataFrame([row for rows in found for row in rows]), RUNS)

    @cached_property
    def prompts(self) -> Frame:
        """A row for every record: one output of one method."""
        return self._of_records(_prompts, PROMPTS)

    @cached_property
    def rounds(self) -> Frame:
        """A row for every round of every output that did not fail."""
        return self._of_records(rounds_of, ROUNDS)

    def _of_records(self, view: Callable[[Frame], Frame], columns: Mapping[str, str]) -> Any:
        # One run's records at a time: all of them together may not fit into memory.
        def read(folder: Path) -> Frame:
            found = view(frame_of(read_records(folder / RECORDS), folder.as_posix()))
            return found[list(columns)].astype({name: "object" for name in columns if columns[name] == "category"})

        found = _readable(self.manifests, read)
        return typed(pandas.concat(found, ignore_index=True) if found else pandas.DataFrame(), columns)


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


def _summary(folder: Path) -> dict[str, Any]:
    """A run's figures: from its summary if that is newer than its records, else computed from the records."""
    summary, file, records = read_summary(folder), folder / SUMMARY, folder / RECORDS
    # Another version's may lack a figure; the records have everything.
    if summary.get("schema") == SCHEMA and file.stat().st_mtime_ns >= records.stat().st_mtime_ns:
        return summary
    return load_run(folder).summary


def _prompts(frame: Frame) -> Frame:
    sums = {name: frame[name].map(sum) for name in metrics.COLUMNS}
    length = (1 + sums["accepted"] / frame.rounds).where(frame.rounds > 0)
    return frame.assign(**sums, mean_acceptance_length=length, batch_seconds=frame.seconds)


# ---------------------------------------------------------------- rows of ``runs``

_FAMILIES = (
    (r"_interval\.1$", "_low"),
    (r"_interval\.2$", "_high"),
    (r"^acceptance_by_position\.unconditional(|_low|_high)\.", r"acceptance\1_at."),
    (r"^acceptance_by_position\.conditional(|_low|_high)\.", r"conditional_acceptance\1_at."),
    (r"^acceptance_by_position\.rounds\.", "rounds_at."),
    (r"^finish_reasons\.", "finish."),
    (r"^lossless\.(unexplained|largest_margin|tie_bound)$", r"\1"),
    (r"^utilization\.stages\.(\w+)\.(mbu|mfu)$", r"\2.\1"),
    (r"^utilization\.prediction\.total_error$", "predicted_error"),
    (r"^utilization\.(wasted|useful_mfu)$", r"\1"),
    (r"^requests\.(phase|stage)_shares\.", r"\1_share."),
    (r"^requests\.concurrency\.running$", "concurrency"),
    (r"^requests\.concurrency\.waiting$", "waiting"),
    (r"^requests\.goodput\.attainment$", "attainment"),
    (r"^requests\.goodput\.per_second$", "goodput"),
    (r"^requests\.(\w+_per_\w+|\w+\.(count|mean|p\d\d\w*))$", r"\1"),
)
"""What figures of a ``MethodSummary`` are called as columns, by the dotted names of their places in it."""


@cache
def _column(name: str) -> str:
    for pattern, short in _FAMILIES:
        name = re.sub(pattern, short, name)
    return name


def method_rows(
    summary: Mapping[str, Any], folder: Path, manifest: Mapping[str, Any], methods: Iterable[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return rows of the frame ``runs``, with further columns that the schema leaves out."""
    whole = {name: summary[name] for name in ("complete", "planned", "confidence")} | _origin(folder, manifest)
    noise = summary.get("noise") or {}
    whole |= {"noise_spread": noise.get("spread"), "other_cores": noise.get("other_cores"), "noisy": noise.get("noisy")}
    rows = []
    for method in methods or summary["methods"]:
        row = flatten({name: value for name, value in method.items() if name != "divergences"}, lists=True)
        row |= {f"{name}.{end}": None for name in row if name.endswith("_interval") for end in (1, 2)}
        row = {_column(name): value for name, value in row.items()}
        row["lossless"] = method["lossless"] and str(method["lossless"]["verdict"])
        # How many divergences there are is known of lossy rules, too, which get no verdict.
        row["divergences"] = len(method["divergences"]) if method["compared_with_plain"] is not None else None
        rows.append(row | whole)
    return rows


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


def typed(frame: Frame, columns: Mapping[str, str]) -> Frame:
    """Return a frame with the columns of a schema, and those of its families that occur, in the schema's order."""
    found: dict[str, pandas.Series] = {}
    for name, dtype in columns.items():
        if name.endswith(".*"):
            family = [column for column in frame.columns if column.startswith(name[:-1])]
            family.sort(key=lambda column: by_number(Path(column.removeprefix(name[:-1]))))
            found |= {column: _typed(frame[column], dtype) for column in family}
        else:
            column = frame[name] if name in frame else pandas.Series([None] * len(frame), dtype=object)
            found[name] = _typed(column, dtype)
    return pandas.DataFrame(found)


def _typed(column: pandas.Series, dtype: str) -> pandas.Series:
    if dtype == "any":
        return _settings(column)
    if dtype.startswith("datetime64"):
        return pandas.to_datetime(column, utc=True, format="ISO8601").astype(dtype)
    return column.astype(dtype)


def _settings(column: pandas.Series) -> pandas.Series:
    """A setting's values in the narrowest type that holds those of all runs; text where they are of several kinds."""
    found = column.convert_dtypes()
    if found.dtype != object:
        return found.astype("float64") if found.dtype == "Float64" else found
    # Lists become their JSON text, so that runs can be grouped by them.
    text = column.map(lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text.where(column.notna()).astype("string")
