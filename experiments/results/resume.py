"""Going on with an interrupted run: ``resume=true`` and the folder of the first attempt.

What is finished stays, batch by batch: a batch of which a record is missing is run again as a whole, because what was
timed together has one time. Everything else follows from the configuration and from random streams that belong to
prompts, so the result is the one of a run that nothing interrupted, times apart.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from experiments.results.manifest import ROOT, git_state, machine, project_state, versions
from experiments.results.origin import MANIFEST, flatten
from experiments.results.records import RECORDS, Record, read_records

_FREE = frozenset(["resume", "out", "progress_every"])
"""Settings that may differ between the attempts."""
_FACTS = ("chosen_hash", "prompts_hash", "device", "dtype", "revisions")
"""Facts about a run that do not follow from its configuration alone, and have to be the same."""
_OTHER = {
    "chosen_hash": "other prompts",
    "prompts_hash": "other prompts",
    "revisions": "other files of its models (revisions in its manifest.json)",
}


def check_facts(manifest: Mapping[str, Any], folder: Path, **facts: object) -> None:
    """Refuse to go on with other prompts, on another device or with another model.

    Raises:
        ValueError: Names what differs.
    """
    for name in _FACTS:
        if name in facts and name in manifest and manifest[name] != facts[name]:
            what = _OTHER.get(name, f"{name} {manifest[name]}, now {facts[name]}")
            raise ValueError(f"resume=true: the run in {folder} had {what}: its results cannot be continued here")


def note_resumed(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write into the manifest when, where and with what the run went on."""
    now = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "git": git_state(ROOT),
        "project": project_state(Path.cwd()),
    }
    text = json.dumps({**manifest, "resumed": [*manifest.get("resumed", []), now]}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def finished_batches(
    folder: Path, turns: Mapping[float, Sequence[int]], *, methods: int, size: int
) -> tuple[list[Record], dict[float, set[int]]]:
    """The records of all batches that every method has finished, and the batches' numbers, by temperature.

    Args:
        folder: The run's folder.
        turns: How many turns each job of the run has, by temperature.
        methods: The number of methods.
        size: Jobs per batch.
    """
    records = read_records(folder / RECORDS) if (folder / RECORDS).exists() else []
    counts = Counter((record.temperature, record.batch) for record in records)
    done: dict[float, set[int]] = {}
    for temperature, listed in turns.items():
        sizes = [methods * sum(listed[start : start + size]) for start in range(0, len(listed), size)]
        done[temperature] = {number for number, wanted in enumerate(sizes) if counts[temperature, number] == wanted}
    kept = [record for record in records if record.batch in done.get(record.temperature, ())]
    return kept, done


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first key whose value differs, with both values; None if the configurations ask for the same."""
    old, new = flatten(before), flatten(now)
    for key in (*old, *new):
        if key not in _FREE and old.get(key, "nothing") != new.get(key, "nothing"):
            return key, old.get(key, "nothing"), new.get(key, "nothing")
    return None
