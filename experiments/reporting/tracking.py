"""Mirrors of a run's results elsewhere. The results themselves are the files in the run's folder.

The only file that imports wandb, and only when a run asks for it.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds beyond wandb's own time limits, before a call that does not keep them is left behind."""


class Tracker(Protocol):
    """Takes a run's results. No method raises, and none takes long: a tracker's failure is not the run's."""

    def start(self, config: Mapping[str, Any], folder: Path) -> None:
        """A run begins, with this resolved configuration and folder."""

    def summary(self, figures: Mapping[str, float]) -> None:
        """The run's final figures, by name."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table of the run, with a row per prompt."""

    def finish(self, exit_code: int) -> None:
        """The run has ended."""


class NullTracker:
    """Tracks nothing."""

    def start(self, config: Mapping[str, Any], folder: Path) -> None:
        """Nothing."""

    def summary(self, figures: Mapping[str, float]) -> None:
        """Nothing."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Nothing."""

    def finish(self, exit_code: int) -> None:
        """Nothing."""


class WandbTracker:
    """Mirrors a run to Weights & Biases; its files go into the run's folder.

    Whatever goes wrong there (not installed, logged out, cut off, not answering) ends the mirroring with one
    warning, and the run goes on.

    Args:
        project: Where the run belongs.
        group: Runs of one experiment.
        tags: To find it by.
        job_type: What kind of run it is.
        name: The run's name; None lets wandb choose.
        entity: Team or user; None is the account's default.
        mode: ``"offline"`` keeps everything on disk for ``wandb sync``; ``"online"`` needs a login.
        timeout: Seconds that any call may take, about; ten times as many for the upload at the end.
    """

    def __init__(
        self,
        project: str,
        *,
        group: str | None = None,
        tags: Sequence[str] = (),
        job_type: str = "run",
        name: str | None = None,
        entity: str | None = None,
        mode: str = "offline",
        timeout: float = 30.0,
    ):
        if mode not in ("offline", "online"):
            raise ValueError(f"tracker.mode={mode!r}: give 'offline' or 'online' (or tracker=none)")
        self._identity = {
            "project": project,
            "group": group,
            "tags": list(tags),
            "job_type": job_type,
            "name": name,
            "entity": entity,
        }
        self._mode = mode
        self._timeout = timeout
        self._run: Any = None

    def start(self, config: Mapping[str, Any], folder: Path) -> None:
        """Begin a run at wandb; offline where the account or the server cannot be reached."""
        # A prompt for the login would wait for someone to type, and wandb talks a lot.
        os.environ.setdefault("WANDB_SILENT", "true")

        def login() -> None:
            import wandb

            if not wandb.login(prompt=False, timeout=int(self._timeout)):
                raise RuntimeError("not logged in (run `wandb login`)")

        def begin() -> None:
            import wandb

            settings = wandb.Settings(
                init_timeout=self._timeout, finish_timeout=self._timeout * 10, silent=True, console="off"
            )
            run = wandb.init(
                **self._identity,
                config=dict(config),
                dir=str(folder),
                mode=mode,
                settings=settings,
                reinit="create_new",
            )
            begun.append(run)

        begun: list[Any] = []  # not self._run, which a call that was given up on must not set later
        mode: Any = self._mode  # wandb's type is a literal
        trouble = _attempt(login, self._timeout + GRACE) if mode == "online" else None
        if trouble is not None:
            mode = "offline"
        failure = _attempt(begin, self._timeout + GRACE)
        if failure is not None:
            self._give_up(failure)
            return
        self._run = begun[0]
        if trouble is not None:
            logger.warning("wandb: %s. The run is recorded offline, and `wandb sync` can upload it.", trouble)

    def summary(self, figures: Mapping[str, float]) -> None:
        """Set the run's summary metrics."""
        self._call(lambda: self._run.summary.update(dict(figures)), self._timeout)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table."""

        def log() -> None:
            import wandb

            self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

        self._call(log, self._timeout)

    def finish(self, exit_code: int) -> None:
        """End the run; what was not uploaded in time stays on disk."""
        self._call(lambda: self._run.finish(exit_code=exit_code), self._timeout * 11)
        self._run = None

    def _call(self, call: Callable[[], object], timeout: float) -> None:
        """Nothing, once mirroring has ended."""
        failure = _attempt(call, timeout) if self._run is not None else None
        if failure is not None:
            self._give_up(failure)

    def _give_up(self, reason: str) -> None:
        logger.warning("wandb: %s. The run goes on without it; its results are in its folder.", reason)
        self._run = None


def _attempt(call: Callable[[], object], timeout: float) -> str | None:
    """Make a call that may fail or hang: None, or what went wrong.

    In a thread, because a call that hangs cannot be ended: it is left behind (a daemon does not keep the process).
    """
    failures: list[str] = []

    def body() -> None:
        try:
            call()
        except ImportError:
            failures.append("not installed (pip install wandb)")
        except BaseException as error:  # wandb raises SystemExit and KeyboardInterrupt of its own, too
            failures.append(f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip("."))

    thread = threading.Thread(target=body, name="wandb", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        return f"no answer within {timeout:g} s"
    return failures[0] if failures else None
