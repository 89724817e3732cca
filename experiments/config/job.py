"""The command or the job of a sweep that Hydra is running: its folder, its overrides and its choices."""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode


def in_sweep() -> bool:
    """Whether this is a job of a sweep, of which the sweep says a line and nothing more."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def sweep_folder() -> Path | None:
    """The folder of the sweep that this is a job of; None outside of one."""
    return Path(HydraConfig.get().sweep.dir) if in_sweep() else None


def overrides() -> list[str]:
    """The overrides that the command or job was given."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def command() -> str:
    """The name of the command."""
    return str(HydraConfig.get().job.name) if HydraConfig.initialized() else "run"


def choice(group: str) -> str | None:
    """The option that was chosen of a group; None where there is none."""
    return HydraConfig.get().runtime.choices.get(group) if HydraConfig.initialized() else None
