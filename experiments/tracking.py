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


class Tracker(Protocol):
    """Takes a run's results. No method raises, and none takes long: a tracker's failure is not the run's."""

    def start(self, config: Mapping[str, Any], folder: Path) -> None:
        """A run begins, with its resolved configuration and its folder."""

    def summary(self, figures: Mapping[str, float]) -> None:
        """Its final figures, by name."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Its rows per prompt."""

    def finish(self, exit_code: int) -> None:
        """It has ended."""


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
        name: Of the run; None lets wandb choose.
        entity: Team or user; None is the account's default.
        mode: ``"offline"`` keeps everything on disk for ``wandb sync``; ``"online"`` needs a login.
        timeout: Seconds that any call may take; ten times as many for the upload at the end.
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
        """Begin a run at wandb."""

        def begin() -> Any:
            # A prompt for the login would wait for someone to type, and wandb talks a lot.
            os.environ.setdefault("WANDB_SILENT", "true")
            import wandb

            if self._mode == "online" and not wandb.login(prompt=False, timeout=int(self._timeout)):
                raise RuntimeError("not logged in: run `wandb login`, or set tracker.mode=offline")
            settings = wandb.Settings(
                init_timeout=self._timeout, finish_timeout=self._timeout * 10, silent=True, console="off"
            )
            return wandb.init(
                **self._identity,
                config=dict(config),
                dir=str(folder),
                mode=self._mode,
                settings=settings,
                reinit="create_new",
            )

        self._run = self._guarded("start", begin, self._timeout + 5)

    def summary(self, figures: Mapping[str, float]) -> None:
        """Set the run's summary metrics."""
        if self._run is not None:
            self._guarded("summary", lambda: self._run.summary.update(dict(figures)), self._timeout)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table."""

        def log() -> None:
            import wandb

            self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

        if self._run is not None:
            self._guarded("table", log, self._timeout)

    def finish(self, exit_code: int) -> None:
        """End the run; what was not uploaded in time stays on disk."""
        if self._run is not None:
            self._guarded("finish", lambda: self._run.finish(exit_code=exit_code, quiet=True), self._timeout * 11)
            self._run = None

    def _guarded(self, what: str, call: Callable[[], Any], timeout: float) -> Any:
        """The call's result; on any failure, a warning and None, and no further calls.

        In a thread, because a call that hangs cannot be ended: it is left behind (a daemon does not keep the process).
        """
        result: list[Any] = []
        errors: list[BaseException] = []

        def body() -> None:
            try:
                result.append(call())
            except BaseException as error:  # wandb also raises SystemExit and KeyboardInterrupt of its own
                errors.append(error)

        thread = threading.Thread(target=body, name=f"wandb-{what}", daemon=True)
        thread.start()
        thread.join(timeout)
        if result:
            return result[0]
        reason = f"no answer within {timeout:g} s" if not errors else _reason(errors[0])
        logger.warning("wandb (%s): %s. The run goes on without it; its results are in its folder.", what, reason)
        self._run = None
        return None


def _reason(error: BaseException) -> str:
    if isinstance(error, ImportError):
        return "not installed (pip install wandb)"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
