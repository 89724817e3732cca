"""A run as its tracker sees it: what it is called, and where it belongs."""

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from experiments.config.sections import sweep_folder
from experiments.results.comparison import settings
from experiments.tracking.base import TrackedRun, flat_config

LONGEST_NAME = 100
"""Characters: what a tracker's list of runs can show."""


def tracked_run(folder: Path, manifest: Mapping[str, Any]) -> TrackedRun:
    """Describe a run to its tracker."""
    sweep = None
    if (swept := sweep_folder()) is not None:  # with its parent's name where its own is a mere time of day, as Hydra's
        mere_time = re.fullmatch(r"[0-9]{2}(-[0-9]{2}){2}", swept.name)
        sweep = f"{swept.parent.name} {swept.name}" if mere_time else swept.name
    # What was typed as it is now has one value in the whole sweep: what varies was typed as "a,b".
    shared = sys.argv if sweep is not None else ()
    given = manifest["overrides"]
    told = [*(text for text in given if text.startswith("experiment=")), *settings(given)]
    methods = [method for method in manifest["exactness"] if manifest["exactness"][method] is not None]
    return TrackedRun(
        folder=folder,
        config=flat_config(manifest),
        name=name_of(told, shared) or ", ".join(methods) or "plain",
        group=sweep,
        command=str(HydraConfig.get().job.name) if HydraConfig.initialized() else "run",
    )


def name_of(overrides: Sequence[str], shared: Collection[str] = ()) -> str:
    """Overrides as the name of a run, of at most ``LONGEST_NAME`` characters.

    A path is shortened to its last part. If the name is still too long, the longest overrides are left out.

    Args:
        shared: Those that all jobs of the sweep have. They come last, and are left out first.
    """
    own = [_without_folders(text) for text in overrides if text not in shared]
    common = [_without_folders(text) for text in overrides if text in shared]
    while len(" ".join([*own, *common])) > LONGEST_NAME:
        words = common or own
        words.remove(max(words, key=len))
    return " ".join([*own, *common])


def _without_folders(override: str) -> str:
    name, equals, value = override.partition("=")
    return name + equals + (value.rstrip("/").rpartition("/")[2] if not value.startswith(("[", "{")) else value)
