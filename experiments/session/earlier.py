"""The earlier attempt that a run goes on from, by its configuration: ``resume=true``."""

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.config import job
from experiments.results.origin import MANIFEST, read_manifest
from experiments.results.records import RECORDS
from experiments.results.resume import difference


def begun(config: DictConfig) -> dict[str, Any] | None:
    """The manifest of the attempt that this run goes on from; None if there is nothing to go on from.

    A seed that was left to chance is the first attempt's.

    Raises:
        ValueError: The folder belongs to another run, or there is none to resume.
    """
    folder = Path(config.out)
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


def json_like(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration as a manifest has it."""
    return json.loads(json.dumps(OmegaConf.to_container(config, resolve=True), default=str))


def _in_begun_sweep() -> bool:
    sweep = job.sweep_folder()
    return sweep is not None and any(sweep.glob(f"*/{MANIFEST}"))


def _how() -> str:
    return "hydra.sweep.dir=FOLDER" if job.in_sweep() else "out=FOLDER"
