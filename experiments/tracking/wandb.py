"""Mirrors a run to Weights & Biases. The only file that imports wandb, and only when a run asks for it."""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.tracking.base import Figures, TrackedRun, Tracker
from experiments.tracking.guard import Guard

GRACE = 5.0
"""Seconds beyond wandb's own time limits, before a call that does not keep them is left behind."""

_LONGEST_NAME = 128  # wandb refuses longer names of runs, groups and tags


class WandbTracker(Tracker):
    """Mirrors a run to Weights & Biases; its files go into the run's folder.

    Whatever goes wrong there (not installed, logged out, cut off, not answering) ends the mirroring with one
    warning, and the run goes on.

    Args:
        group, job_type, name: None for the sweep's folder, the command, and the run's overrides.
        mode: ``"offline"`` keeps everything on disk for ``wandb sync``; ``"online"`` needs a login.
        trace: Keep the run's trace, too, which may be large.
        timeout: Seconds that any call may take, about; ten times as many for the upload at the end.
    """

    def __init__(
        self, project: str, *, group: str | None = None, tags: Sequence[str] = (), job_type: str | None = None,
        name: str | None = None, entity: str | None = None, mode: str = "offline", trace: bool = False,
        timeout: float = 30.0,
    ):  # fmt: skip
        if mode not in ("offline", "online"):
            raise ValueError(f"tracker.mode={mode!r}: give 'offline' or 'online' (or tracker=none)")
        self._identity: dict[str, Any] = {"project": project, "entity": entity, "tags": [str(tag)[:64] for tag in tags]}
        self._names: dict[str, Any] = {"group": group, "job_type": job_type, "name": name}
        self._mode, self._trace, self._guard = mode, trace, Guard("wandb", timeout)
        self._run: Any = None
        self._defined: set[str] = set()

    def start(self, run: TrackedRun) -> None:
        """Begin a run at wandb; offline where the account or the server cannot be reached."""
        # A prompt for the login would wait for someone to type, and wandb talks a lot.
        os.environ.setdefault("WANDB_SILENT", "true")
        self._defined = set()
        guard, limit, trouble = self._guard, self._guard.timeout + GRACE, None
        if self._mode == "online":
            trouble = guard.attempt(self._login, limit) or guard.attempt(lambda: self._begin(run, "online"), limit)
        guard.is_open = True
        if self._mode == "online" and trouble is None:
            return
        begun = guard.attempt(lambda: self._begin(run, "offline"), limit) is None
        if not begun:
            # The service that an earlier run of this process has used may have died: once more, with a new one.
            guard.attempt(lambda: import_module("wandb").teardown(), GRACE)
            begun = guard.call(lambda: self._begin(run, "offline"), limit)
        if begun and trouble is not None:
            guard.warn(f"{trouble}. The run is recorded offline, and `wandb sync` can upload it.")

    def progress(self, figures: Mapping[str, float], prompts: int) -> None:
        self._guard.call(lambda: self._log("prompts_done", prompts, figures))

    def curve(self, axis: str, lines: Mapping[str, Mapping[int, float]]) -> None:
        """Log lines over an axis of their own; the summary does not get their last values."""
        places = sorted({place for line in lines.values() for place in line})

        def log() -> None:
            for at in places:
                self._log(axis, at, {name: line[at] for name, line in lines.items() if at in line}, summary="none")

        self._guard.call(log)

    def summary(self, figures: Figures) -> None:
        self._guard.call(lambda: self._run.summary.update(dict(figures)))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        def log() -> None:
            import wandb

            # Columns such as an error are often all None at first: no types are derived, and none can clash.
            data: Any = [list(row) for row in rows]
            self._run.log({name: wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)})

        self._guard.call(log)

    def files(self, kind: str, paths: Sequence[Path]) -> None:
        """Log pictures as images, and all other files as an artifact of the run."""
        if kind == "trace" and not self._trace:
            return
        pictures = [path for path in paths if path.suffix == ".png"]
        others = [path for path in paths if path not in pictures]

        def log() -> None:
            import wandb

            if pictures:
                self._run.log({f"pictures/{path.stem}": wandb.Image(str(path)) for path in pictures})
            if others:
                artifact = wandb.Artifact(f"{kind}-{self._run.id}", type=kind)
                for path in others:
                    # Files of a trace never change, so wandb need not keep copies until it uploads them.
                    artifact.add_file(str(path), name=path.name, policy="immutable" if kind == "trace" else "mutable")
                self._run.log_artifact(artifact)

        self._guard.call(log)

    def finish(self, exit_code: int) -> None:
        """End the run; what was not uploaded in time stays on disk."""
        self._guard.call(lambda: self._run.finish(exit_code=exit_code), self._guard.timeout * 11)
        self._guard.is_open = False
        self._run = None

    def _login(self) -> None:
        import wandb

        if not wandb.login(prompt=False, timeout=int(self._guard.timeout)):
            raise RuntimeError("not logged in (run `wandb login`)")

    def _begin(self, run: TrackedRun, mode: Any) -> None:
        """Begin a run in a mode (Any, because wandb's type is a literal)."""
        import wandb

        given = {"group": run.group, "job_type": run.command, "name": run.name}
        names = {key: self._names[key] or given[key] for key in given}
        names = {key: value[:_LONGEST_NAME] if value else value for key, value in names.items()}
        timeout, config = self._guard.timeout, dict(run.config)
        settings = wandb.Settings(init_timeout=timeout, finish_timeout=timeout * 10, silent=True, console="off")
        where = {"dir": str(run.folder), "mode": mode, "settings": settings}
        begun = wandb.init(**self._identity, **names, config=config, reinit="create_new", **where)
        if mode == "online" and self._guard.is_open:
            begun.finish(exit_code=1)  # too late: this call was given up on, and the run is recorded offline
            return
        self._run = begun

    def _log(self, axis: str, place: int, figures: Mapping[str, float], summary: str | None = None) -> None:
        """Log figures at a place of an axis, which wandb has to know before it first sees them."""
        if axis not in self._defined:
            self._run.define_metric(axis, hidden=True, summary="none")
        for name in figures.keys() - self._defined:
            self._run.define_metric(name, step_metric=axis, summary=summary)
        self._defined |= {axis, *figures}
        self._run.log({axis: place, **figures})
