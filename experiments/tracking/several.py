"""Several trackers as one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.tracking.base import Figures, TrackedRun, Tracker


class SeveralTrackers:
    """Mirrors a run to several places, each of which may fail alone.

    Args:
        trackers: By a name that is only for the command line; None for one that is switched off.
    """

    def __init__(self, trackers: Mapping[str, Tracker | None]):
        self._trackers = [tracker for tracker in trackers.values() if tracker is not None]

    def start(self, run: TrackedRun) -> None:
        """Tell all."""
        for tracker in self._trackers:
            tracker.start(run)

    def progress(self, figures: Mapping[str, float], prompts: int) -> None:
        """Tell all."""
        for tracker in self._trackers:
            tracker.progress(figures, prompts)

    def curve(self, axis: str, lines: Mapping[str, Mapping[int, float]]) -> None:
        """Tell all."""
        for tracker in self._trackers:
            tracker.curve(axis, lines)

    def summary(self, figures: Figures) -> None:
        """Tell all."""
        for tracker in self._trackers:
            tracker.summary(figures)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Tell all."""
        for tracker in self._trackers:
            tracker.table(name, columns, rows)

    def files(self, kind: str, paths: Sequence[Path]) -> None:
        """Tell all."""
        for tracker in self._trackers:
            tracker.files(kind, paths)

    def finish(self, exit_code: int) -> None:
        """Tell all."""
        for tracker in self._trackers:
            tracker.finish(exit_code)
