"""A run's configuration and results as flat names, numbers, words and rows, as trackers take them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.results.comparison import commit_of
from experiments.results.records import Record
from experiments.results.rows import Row, positions

_NO_SETTINGS = ("out", "resume", "tracker", "experiment")
_OF_POSITIONS = ("acceptance", "conditional_acceptance", "rounds_at", "temperature", "complete", "planned")
"""Columns that are lines of their own, or the run's."""
_FACTS = ("dtype", "device", "prompts", "prompts_hash", "exactness", "overrides", "versions", "drafter_cache")


def flat_config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration, and what its manifest says besides, in a form that runs can be grouped and filtered by.

    A component's ``_target_`` becomes ``component``, the bare name of its class. A list becomes the text that one
    would type on the command line. What does not change a result, such as the output folder, is left out.
    """
    config = {name: _plain(value) for name, value in manifest["config"].items() if name not in _NO_SETTINGS}
    config |= {name: _plain(manifest[name]) for name in _FACTS if name in manifest}
    for name, value in manifest.get("target", {}).items():
        if isinstance(config.get("target"), dict) and name != "name":  # as it was given, not as it was found
            config["target"][name] = _plain(value)
    return config | {"commit": commit_of(manifest)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        section = {str(name): _plain(inner) for name, inner in value.items() if not str(name).startswith("_")}
        if not value.get("_target_"):
            return section
        parts = str(value["_target_"]).split(".")  # the class in package.module.Class.method, or else the last name
        return {"component": next((part for part in parts if part[:1].isupper()), parts[-1]), **section}
    if isinstance(value, list | tuple):
        return json.dumps(value, separators=(",", ":"), default=str, ensure_ascii=False)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def figures_of(row: Row) -> Mapping[str, float | str]:
    """A method's figures under the names of their columns: ``speedup``, ``stage_seconds/verify``, ``lossless``."""
    words = {name: str(row[name]) for name in ("exactness", "lossless") if row[name] is not None}
    return words | {
        name.replace(".", "/"): value
        for name, value in row.items()
        if isinstance(value, int | float) and not name.startswith(_OF_POSITIONS)
    }


def acceptance_lines(row: Row) -> dict[str, dict[int, float]]:
    """Acceptance by position: two lines, with positions from 1."""
    kinds = {"unconditional": "acceptance_at", "conditional": "conditional_acceptance_at"}
    return {
        f"acceptance/{name}": {at: share for at, share in enumerate(positions(row, kind), start=1) if share is not None}
        for name, kind in kinds.items()
    }


def accepted_histogram(records: Sequence[Record]) -> dict[str, dict[int, float]]:
    """The share of rounds that accepted 0, 1, 2, … drafted tokens."""
    accepted = [count for record in records if not record.failed for count in record.accepted]
    if not accepted:
        return {}
    shares = {count: accepted.count(count) / len(accepted) for count in range(max(accepted) + 1)}
    return {"rounds_by_accepted_tokens": shares}


def prompt_table(records: Sequence[Record]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a table with one row per record."""
    columns = ["prompt", "turn", "category", "sample", "method", "exactness", "temperature", "prompt_tokens"]
    derived = {
        "tokens": lambda record: len(record.token_ids),
        "batch_seconds": lambda record: record.seconds,
        "rounds": lambda record: len(record.accepted),
    }
    columns += [*derived, "mean_acceptance_length", "finish_reason", "equals_plain", "divergence", "margin"]
    columns += ["error", "text"]
    rows = [
        [derived[name](record) if name in derived else getattr(record, name) for name in columns] for record in records
    ]
    return columns, rows
