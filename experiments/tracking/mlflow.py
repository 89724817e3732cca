"""Mirrors a run to MLflow. The only file that imports mlflow, and only when a run asks for it."""

import csv
import io
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.tracking.base import Figures, TrackedRun, dotted
from experiments.tracking.guard import Guard

_LONGEST_PARAMETER = 6000  # characters; MLflow refuses longer values
_PARAMETERS_AT_ONCE = 100  # and more of them in one call


class MlflowTracker:
    """Mirrors a run to MLflow: by default into ``mlflow.db`` and ``mlruns`` where the command was started.

    Whatever goes wrong there ends the mirroring with one warning, and the run goes on.

    Args:
        experiment: The experiment that the run belongs to; made if it is new.
        uri: Where MLflow keeps its data; None for ``MLFLOW_TRACKING_URI``, or a database in the current folder.
        group: Value of the tag ``group``; None for the name of the sweep's folder, if there is a sweep.
        tags: Words to find the run by: each becomes a tag with the value ``true``.
        name: The run's name; None for its overrides.
        trace: Keep the run's trace, too, which may be large.
        timeout: Seconds that a call may take; ten times as many for files, and for the start, where a new database is
            made.
    """

    def __init__(
        self,
        experiment: str,
        *,
        uri: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        name: str | None = None,
        trace: bool = False,
        timeout: float = 60.0,
    ):
        self._experiment = experiment
        self._uri = uri
        self._group = group
        self._tags = [str(tag) for tag in tags]
        self._name = name
        self._trace = trace
        self._guard = Guard("mlflow", "'specdec[mlflow]'", timeout)
        self._client: Any = None
        self._id = ""
        self._prompts = 0

    def start(self, run: TrackedRun) -> None:
        """Begin a run of the experiment, with the configuration as its parameters."""
        self._prompts = 0
        self._guard.open()
        self._guard.call(lambda: self._begin(run), self._guard.timeout * 10)

    def progress(self, figures: Mapping[str, float], prompts: int) -> None:
        """Log metrics whose step is the number of prompts."""

        def log() -> None:
            self._prompts = prompts
            self._log(figures, prompts)

        self._guard.call(log)

    def curve(self, axis: str, lines: Mapping[str, Mapping[int, float]]) -> None:
        """Log metrics whose step is the place on the axis."""

        def log() -> None:
            for place in sorted({place for line in lines.values() for place in line}):
                self._log({name: line[place] for name, line in lines.items() if place in line}, place)

        self._guard.call(log)

    def summary(self, figures: Figures) -> None:
        """Log the numbers as metrics, and the words as tags."""

        def log() -> None:
            numbers = {name: value for name, value in figures.items() if not isinstance(value, str)}
            self._log(numbers, self._prompts)
            for name, value in figures.items():
                if isinstance(value, str):
                    self._client.set_tag(self._id, allowed(name), value)

        self._guard.call(log)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Keep a table as an artifact, which MLflow shows as a table."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
        self._guard.call(lambda: self._client.log_text(self._id, text.getvalue(), f"{name}.csv"))

    def files(self, kind: str, paths: Sequence[Path]) -> None:
        """Keep files as artifacts, in a folder of their kind."""
        if kind == "trace" and not self._trace:
            return

        def log() -> None:
            for path in paths:
                self._client.log_artifact(self._id, str(path), kind)

        self._guard.call(log, self._guard.timeout * 10)

    def finish(self, exit_code: int) -> None:
        """End the run: finished, killed (by Ctrl-C) or failed."""
        status = {0: "FINISHED", 130: "KILLED"}.get(exit_code, "FAILED")
        self._guard.call(lambda: self._client.set_terminated(self._id, status))
        self._guard.close()

    def _begin(self, run: TrackedRun) -> None:
        # It reports on every table of a new database.
        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("mlflow.store").setLevel(logging.WARNING)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=self._uri)
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(self._experiment)
        tags = dict.fromkeys(map(allowed, self._tags), "true") | {"command": run.command}
        group = self._group or run.group
        tags |= {"group": group} if group else {}
        begun = self._client.create_run(experiment, tags=tags, run_name=self._name or run.name)
        self._id = begun.info.run_id
        parameters = [
            Param(allowed(name), str(value)[:_LONGEST_PARAMETER]) for name, value in dotted(run.config).items()
        ]
        for start in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            self._client.log_batch(self._id, params=parameters[start : start + _PARAMETERS_AT_ONCE])

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(allowed(name), float(value), now, step) for name, value in figures.items()]
        for start in range(0, len(metrics), 1000):  # MLflow refuses more at once
            self._client.log_batch(self._id, metrics=metrics[start : start + 1000])


def allowed(name: str) -> str:
    """A name without the characters that MLflow refuses: ``model/T=0/speedup`` becomes ``model/T_0/speedup``."""
    return re.sub(r"[^\w\-. :/]", "_", name)
