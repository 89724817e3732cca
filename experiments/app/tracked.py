"""A run as its tracker sees it: what it is called, and where it belongs."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from experiments.results.comparison import settings
from experiments.tracking.base import TrackedRun
from experiments.tracking.flat import flat_config


def tracked_run(folder: Path, manifest: Mapping[str, Any]) -> TrackedRun:
    """Describe a run to its tracker.

    Args:
        folder: The run's.
        manifest: What made the run.
    """
    methods = [method for method in manifest["exactness"] if manifest["exactness"][method] is not None]
    return TrackedRun(
        folder=folder,
        config=flat_config(manifest),
        name=" ".join(settings(manifest["overrides"])) or ", ".join(methods) or "plain",
        group=_sweep(),
        command=str(HydraConfig.get().job.name) if HydraConfig.initialized() else "run",
    )


def _sweep() -> str | None:
    """The name of the sweep that this run is a job of."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    return sweep_name(Path(HydraConfig.get().sweep.dir))


def sweep_name(folder: Path) -> str:
    """The folder's own name; with its parent's where that is a mere time of day, as Hydra's default is."""
    mere_time = re.fullmatch(r"[0-9]{2}(-[0-9]{2}){2}", folder.name)
    return f"{folder.parent.name} {folder.name}" if mere_time else folder.name
