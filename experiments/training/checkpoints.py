"""The files of a training: checkpoints, and folders of weights that appear when they are complete."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_PATTERN, _KEPT = "step-*.pt", 2


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in a folder; None if there is none."""
    return max(folder.glob(_PATTERN), default=None)


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write a checkpoint into a folder, and keep the one before it."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "unfinished"
    torch.save(state, unfinished)
    os.replace(unfinished, folder / f"step-{step:08d}.pt")  # a process that dies before this leaves no checkpoint
    for old in sorted(folder.glob(_PATTERN))[:-_KEPT]:
        old.unlink()


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder that appears under its name when it is complete, and takes the place of an older one."""
    unfinished, old = (folder.with_name(f".{folder.name}.{state}") for state in ("unfinished", "old"))
    for left in (unfinished, old):
        shutil.rmtree(left, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write(unfinished)
    if folder.exists():
        folder.rename(old)
    unfinished.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
