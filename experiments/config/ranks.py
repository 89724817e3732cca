"""Commands under torchrun: several processes run the same command, and the first of them speaks for all.

The others compute along, as they share a target. What they would print goes nowhere, and what they would write goes to
a folder that is removed at their end. A process that fails ends, and torchrun then ends the others.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from experiments.config.sections import in_sweep


def processes() -> int:
    """The number of processes that torchrun has started, of which this is one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def follows() -> bool:
    """Whether this process is one of several, and not the first."""
    return processes() > 1 and os.environ.get("RANK", "0") != "0"


def arguments(words: list[str]) -> list[str]:
    """The words of a command line for this process: one that follows leaves no trace in Hydra's folder."""
    if not follows():
        return words
    return [*words, f"hydra.run.dir={tempfile.gettempdir()}", "hydra.output_subdir=null", "hydra/job_logging=disabled"]


def whose(message: str) -> str:
    """A message with the number of this process, if there are several and it follows."""
    return f"process {os.environ['RANK']}: {message}" if follows() else message


@contextmanager
def taking_part(config: DictConfig, *, divides: bool = False) -> Iterator[None]:
    """Run a command as one of the processes that torchrun has started; alone it changes nothing.

    A process that follows prints nothing but the error that ends it, and works in a folder of its own, which begins as
    a copy of the run that it resumes, if any.

    Args:
        divides: Whether the command divides its work among the processes by itself, as a training does.

    Raises:
        ValueError: The command cannot run in several processes, or not with this configuration.
    """
    if processes() == 1:
        yield
        return
    if not divides:
        _check(config)
        import torch

        if torch.cuda.is_available() and (local := int(os.environ["LOCAL_RANK"])) < torch.cuda.device_count():
            torch.cuda.set_device(local)  # each its own from the beginning, whichever model it loads first
    try:
        if not follows():
            yield
            return
        with (
            open(os.devnull, "w") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
            tempfile.TemporaryDirectory(prefix="specdec-") as own,
        ):
            if not divides:
                folder = Path(own) / "run"
                if config.get("resume") and Path(config.out).is_dir():
                    shutil.copytree(config.out, folder)
                with open_dict(config):
                    config.out = str(folder)
            yield
    finally:
        if "torch" in sys.modules:  # leave the group, so that no thread of it is left when the process ends
            import torch.distributed

            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def _check(config: DictConfig) -> None:
    started, target = processes(), config.get("target")
    parallel: Any = None if target is None else target.get("tensor_parallel")
    if parallel is not True and parallel in (None, False, 1):
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
