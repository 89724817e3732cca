"""Mirrors a run through one of accelerate's trackers: TensorBoard, MLflow, Trackio, Aim, Comet, ClearML and others."""

import re
from collections.abc import Mapping
from typing import Any

from experiments.results.origin import flatten
from experiments.tracking.base import Figures, TrackedRun, Tracker
from experiments.tracking.guard import Guard


class AccelerateTracker(Tracker):
    """Mirrors a run's configuration, running figures, lines and final figures; accelerate's trackers take no more.

    Whatever goes wrong there ends the mirroring with one warning, and the run goes on.

    Args:
        service: accelerate's name of it: ``"tensorboard"``, ``"mlflow"``, ``"trackio"``, ``"aim"``, ``"comet_ml"``,
            ``"clearml"``, ``"dvclive"`` or ``"swanlab"``.
        project: Where the run belongs, as far as the service knows projects.
        options: More arguments of accelerate's class for this service.
        timeout: Seconds that a call may take; ten times as many for the start.

    Raises:
        ValueError: accelerate has no such tracker.
    """

    def __init__(
        self, service: str, *, project: str = "specdec", options: Mapping[str, Any] | None = None, timeout: float = 60.0
    ):
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS  # accelerate loads torch

        if service not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise ValueError(f"tracker.service={service!r}: accelerate has trackers for {known}")
        self._class: Any = LOGGER_TYPE_TO_CLASS[service]
        self._project, self._options = project, dict(options or {})
        self._guard = Guard(service, timeout)
        self._tracker: Any = None
        self._settings: dict[str, Any] = {}
        self._prompts = 0

    def start(self, run: TrackedRun) -> None:
        """Begin a run with the configuration; services that write files put them into the run's folder."""

        def begin() -> None:
            folder = {"logging_dir": str(run.folder)} if self._class.requires_logging_directory else {}
            self._tracker = self._class(self._project, **{**folder, **self._options})
            self._tracker.start()
            self._tracker.store_init_configuration(self._settings)

        settings = flatten(run.config) | {"name": run.name, "group": run.group, "command": run.command}
        self._settings = {
            name: value if isinstance(value, bool | int | float) else str(value) for name, value in settings.items()
        }
        self._prompts = 0
        self._guard.is_open = True
        self._guard.call(begin, self._guard.timeout * 10)

    def progress(self, figures: Mapping[str, float], prompts: int) -> None:
        """Log figures whose step is the number of prompts."""
        self._prompts = prompts
        self._log(figures, prompts)

    def curve(self, axis: str, lines: Mapping[str, Mapping[int, float]]) -> None:
        """Log figures whose step is the place on the axis."""
        for place in sorted({place for line in lines.values() for place in line}):
            self._log({name: line[place] for name, line in lines.items() if place in line}, place)

    def summary(self, figures: Figures) -> None:
        """Log the numbers at the last step, and the words beside the configuration: most services log no words."""
        words = {name: value for name, value in figures.items() if isinstance(value, str)}
        self._log({name: value for name, value in figures.items() if name not in words}, self._prompts)
        self._guard.call(lambda: self._tracker.store_init_configuration(self._settings | _allowed(words)))

    def finish(self, exit_code: int) -> None:
        self._guard.call(lambda: self._tracker.finish(), self._guard.timeout * 10)
        self._guard.is_open = False
        self._tracker = None

    def _log(self, figures: Figures, step: int) -> None:
        self._guard.call(lambda: self._tracker.log(_allowed(figures), step=step))


def _allowed(figures: Figures) -> dict[str, float | str]:
    """Figures under names that MLflow takes: ``model/T=0/speedup`` becomes ``model/T_0/speedup``."""
    return {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in figures.items()}
