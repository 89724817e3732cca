"""A run's story told to wandb itself, in a process of its own: ``python -m tests.experiments.tracking.child``.

Arguments: a folder, and what goes wrong: the service is killed in the middle of the run, or the disk is full.
"""

import logging
import resource
import sys
from pathlib import Path

from experiments.tracking.wandb import WandbTracker
from tests.experiments.tracking.everything import begin, end


def kill_the_service() -> None:
    """End the process that wandb has started."""
    import psutil

    services = [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]
    assert services
    for service in services:
        service.kill()
    psutil.wait_procs(services, timeout=10)


def main(folder: Path, trouble: str) -> None:
    """Tell the story."""
    logging.basicConfig(level=logging.WARNING, format="WARNING %(message)s", stream=sys.stdout)
    tracker = WandbTracker("p", timeout=60, tags=["t"], trace=True)
    if trouble == "full disk":
        # No process of this one's may make a larger file: writing more is an error, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    begin(tracker, folder)
    if trouble == "killed":
        kill_the_service()
    end(tracker, folder)
    if trouble == "killed":
        (folder / "next").mkdir()  # the next job of a sweep
        begin(tracker, folder / "next")
        end(tracker, folder / "next")
    print("DONE")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
