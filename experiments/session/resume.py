"""The earlier attempt that a run or training goes on from, by its configuration: ``resume=true``.

A job that SLURM has started again goes on without being told to.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.config.sections import plain_whole, sweep_folder
from experiments.results.origin import MANIFEST, difference, flatten, read_manifest
from experiments.results.records import RECORDS
from specdec.quantization.speed import AUTO


def begun(
    config: DictConfig, *, kind: str = "run", begins: str = RECORDS, elsewhere: Iterable[str] = ()
) -> dict[str, Any] | None:
    """The manifest of the attempt that this one goes on from; None if there is nothing to go on from.

    A seed that was left to chance is the first attempt's, and so are formats that were left to the machine.

    Args:
        begins: The file that every attempt has which must not be written over.
        elsewhere: Settings of the target that may differ, because they say where it runs.

    Raises:
        ValueError: The folder belongs to another attempt, or there is none to resume.
    """
    folder = Path(config.out)
    requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    if not config.resume and not requeued:
        if (folder / begins).exists():
            raise ValueError(
                f"{folder} holds the results of another {kind}: give another out, remove it, or go on with resume=true"
            )
        return None
    if not (folder / MANIFEST).exists():
        sweep = sweep_folder()
        if requeued or (sweep is not None and any(sweep.glob(f"*/{MANIFEST}"))):
            return None  # a job that had not begun, or that the sweep had not come to
        raise ValueError(
            f"resume=true: there is no {kind} in {folder}, give the interrupted one's folder as out=FOLDER"
        )
    manifest = read_manifest(folder)
    if config.seed is None:
        config.seed = manifest["config"].get("seed")
    recorded = flatten(manifest["config"])
    for name, value in flatten(plain_whole(config)).items():
        if name.endswith(".quantization") and value == AUTO:
            OmegaConf.select(config, name.rpartition(".")[0]).quantization = recorded.get(name)
    before, now = manifest["config"], json.loads(json.dumps(plain_whole(config), default=str))  # as a manifest has it
    for name in elsewhere:
        for each in (before, now):
            each.get("target", {}).pop(name, None)
    found = difference(before, now)
    if found is not None:
        key, was, given = found
        raise ValueError(
            f"resume=true: the {kind} in {folder} had {key}={was}, and this one has {key}={given}: give what it was "
            f"begun with"
        )
    return manifest
