"""A run's story told to wandb itself, in a process of its own: ``python -m tests.experiments.tracking.child``.

Argument: a folder. The service is killed in the middle of the run, and another run follows.
"""

import logging
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


def main(folder: Path) -> None:
    """Tell the story."""
    logging.basicConfig(level=logging.WARNING, format="WARNING %(message)s", stream=sys.stdout)
    tracker = WandbTracker("p", timeout=60, tags=["t"], trace=True)
    begin(tracker, folder)
    kill_the_service()
    end(tracker, folder)
    (folder / "next").mkdir()  # the next job of a sweep
    begin(tracker, folder / "next")
    end(tracker, folder / "next")
    print("DONE")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
