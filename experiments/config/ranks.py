"""Commands under torchrun: several processes run the same command, and the first of them speaks for all.

The others compute along, as they share a target. What they would print goes nowhere, and what they would write goes to
a folder that is removed at their end. A process that fails ends, and torchrun then ends the others.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from experiments.config.job import in_sweep

_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Timed out", "timed out")
"""What torch says when another process is gone."""


_PATIENCE = 5.0
"""Seconds in which a process that fails with the same error as another one has been ended by torchrun."""


def processes() -> int:
    """Returns the number of processes that torchrun has started, of which this is one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def follows() -> bool:
    """Returns whether this process is one of several, and not the first."""
    return processes() > 1 and os.environ.get("RANK", "0") != "0"


def arguments(words: list[str]) -> list[str]:
    """Returns the words of a command line for this process: one that follows leaves no trace in Hydra's folder."""
    if not follows():
        return words
    return [*words, f"hydra.run.dir={tempfile.gettempdir()}", "hydra.output_subdir=null", "hydra/job_logging=disabled"]


@contextmanager
def in_silence() -> Iterator[None]:
    """Print nothing during the ``with`` block if this process follows, except the error that ends it."""
    if not follows():
        yield
        return
    out, err = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stdout, sys.stderr = out, err


@contextmanager
def taking_part(config: DictConfig, *, divides: bool = False) -> Iterator[None]:
    """Run a command as one of the processes that torchrun has started; alone it changes nothing.

    A process that follows works in a folder of its own, which begins as a copy of the run that it resumes, if any.

    Args:
        divides: Whether the command divides its work among the processes by itself, as a training does.

    Raises:
        ValueError: The command cannot run in several processes, or not with this configuration.
    """
    if processes() == 1:
        yield
        return
    if divides:
        try:
            yield
        finally:
            _leave()
        return
    _check(config)
    _bind_device()
    try:
        if not follows():
            yield
            return
        with tempfile.TemporaryDirectory(prefix="specdec-") as own:
            folder = Path(own) / "run"
            if config.get("resume") and Path(config.out).is_dir():
                shutil.copytree(config.out, folder)
            with open_dict(config):
                config.out = str(folder)
            yield
    finally:
        _leave()


def explained(error: BaseException) -> str | None:
    """Returns a sentence about an error that only says that another process is gone; None for any other."""
    if processes() == 1 or not isinstance(error, RuntimeError) or not any(sign in str(error) for sign in _LOST):
        return None
    return f"another of the {processes()} processes that work together has ended: its own message says why"


def whose(message: str) -> str:
    """Returns a message with the number of this process, if there are several and it follows."""
    return f"process {os.environ['RANK']}: {message}" if follows() else message


def let_the_first_speak() -> None:
    """Wait, if this process follows, before it shows what may be wrong in every process.

    The first process then shows it once and ends, and torchrun ends this one. Only what is wrong here alone is shown.
    """
    if follows() and not _joined():
        time.sleep(_PATIENCE)


def _check(config: DictConfig) -> None:
    started = processes()
    target: Any = config.get("target")
    if target is None:
        raise ValueError(f"torchrun has started {started} processes, and this command needs one: start it without")
    shared = target.get("tensor_parallel") not in (None, False, 1) or target.get("tensor_parallel") is True
    if not shared:
        raise ValueError(
            f"torchrun has started {started} processes that would all do the same: give "
            f"target.tensor_parallel={started}, or start one process"
        )
    if in_sweep():
        raise ValueError("a sweep starts its jobs in this process: start torchrun once for every job instead")
    if config.get("seed", 0) is None:
        raise ValueError("seed=null: processes that share a target need the same seed, give a number")
    if config.get("contenders"):
        raise ValueError("contenders run whole models in one process: leave them out with target.tensor_parallel")


def _bind_device() -> None:
    """Make every process use its own GPU from the beginning, whichever model it loads first."""
    import torch

    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available() and local < torch.cuda.device_count():
        torch.cuda.set_device(local)


def _joined() -> bool:
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _leave() -> None:
    """Leave the group, so that no thread of it is left when the process ends."""
    if _joined():
        import torch.distributed

        torch.distributed.destroy_process_group()
