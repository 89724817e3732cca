"""Training state on disk: each checkpoint is whole or not there, whenever the process dies."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_PATTERN = "step-*.pt"


class Checkpoints:
    """The checkpoints of one training.

    Args:
        keep: How many of the newest are kept.
    """

    def __init__(self, folder: Path, keep: int = 2):
        self.folder, self.keep = folder, keep

    def newest(self) -> Path | None:
        """The newest checkpoint; None if there is none."""
        found = sorted(self.folder.glob(_PATTERN))
        return found[-1] if found else None

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint, and remove those that are not kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{step:08d}.pt"
        unfinished = self.folder / "unfinished"
        torch.save(state, unfinished)
        os.replace(unfinished, path)  # a process that dies before this line leaves no checkpoint
        for old in sorted(self.folder.glob(_PATTERN))[: -self.keep]:
            old.unlink()
        return path

    def load(self, path: Path, device: torch.device) -> dict[str, Any]:
        """Read a checkpoint."""
        return torch.load(path, map_location=device, weights_only=True)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder that appears under its name when it is complete, and takes the place of an older one."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    old = folder.with_name(f".{folder.name}.old")
    for left in (unfinished, old):
        shutil.rmtree(left, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write(unfinished)
    if folder.exists():
        folder.rename(old)
    unfinished.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
