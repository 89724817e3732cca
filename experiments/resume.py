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

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments.jobs import Job
from experiments.manifest import MANIFEST, git_state, machine, read_manifest, versions
from experiments.records import RECORDS, Record, read_records

_FREE = frozenset(["resume", "out"])
"""What may differ between the attempts."""
_FACTS = ("prompts_hash", "device", "dtype")
"""What the configuration does not settle alone, but has to be the same."""


def begun(config: DictConfig) -> dict[str, Any] | None:
    """The manifest of the attempt that this run goes on from; None if there is nothing to go on from.

    A seed that was left to chance is the first attempt's.

    Raises:
        ValueError: The folder belongs to another run, or there is none to resume.
    """
    folder = Path(config.out)
    if type(config.resume) is not bool:
        raise ValueError(f"resume={config.resume!r}: give true or false")
    if not config.resume:
        if (folder / RECORDS).exists():
            raise ValueError(
                f"{folder} holds the results of another run: give another out, remove it, or go on with resume=true"
            )
        return None
    if not (folder / MANIFEST).exists():
        if _in_begun_sweep():
            return None  # a job that the sweep had not come to
        raise ValueError(f"resume=true: there is no run in {folder}, give the interrupted one's folder as {_how()}")
    manifest = read_manifest(folder)
    if config.seed is None:
        config.seed = manifest["config"].get("seed")
    found = difference(manifest["config"], json_like(config))
    if found is not None:
        key, before, now = found
        raise ValueError(
            f"resume=true: the run in {folder} had {key}={before}, and this one has {key}={now}: "
            f"give what it was begun with"
        )
    return manifest


def check_facts(manifest: Mapping[str, Any], folder: Path, **facts: object) -> None:
    """Refuse to go on with other prompts, on another device or with another model.

    Raises:
        ValueError: Names what differs.
    """
    for name in _FACTS:
        if name in facts and manifest.get(name) != facts[name]:
            what = "other prompts" if name == "prompts_hash" else f"{name} {manifest.get(name)}, now {facts[name]}"
            raise ValueError(f"resume=true: the run in {folder} had {what}: its results cannot be continued here")


def note_resumed(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write into the manifest when, where and with what the run went on."""
    now = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "git": git_state(Path(__file__).parent.parent),
    }
    text = json.dumps({**manifest, "resumed": [*manifest.get("resumed", []), now]}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def finished_batches(
    folder: Path, jobs: Mapping[float, Sequence[Job]], *, methods: int, size: int
) -> tuple[list[Record], dict[float, set[int]]]:
    """The records of all batches that every method has finished, and the batches' numbers, by temperature.

    Args:
        folder: The run's.
        jobs: All jobs of the run, by temperature.
        methods: How many there are.
        size: Jobs per batch.
    """
    records = read_records(folder / RECORDS) if (folder / RECORDS).exists() else []
    counts = Counter((record.temperature, record.batch) for record in records)
    done: dict[float, set[int]] = {}
    for temperature, listed in jobs.items():
        sizes = [
            methods * sum(len(job.prompt.turns) for job in listed[start : start + size])
            for start in range(0, len(listed), size)
        ]
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


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def json_like(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration as a manifest has it."""
    return json.loads(json.dumps(OmegaConf.to_container(config, resolve=True), default=str))


def _in_begun_sweep() -> bool:
    if not _sweeping():
        return False
    return any(Path(HydraConfig.get().sweep.dir).glob(f"*/{MANIFEST}"))


def _sweeping() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def _how() -> str:
    return "hydra.sweep.dir=FOLDER" if _sweeping() else "out=FOLDER"
