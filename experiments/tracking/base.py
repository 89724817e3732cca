"""The interface of trackers. The results themselves are the files in the run's folder; a tracker only mirrors them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Figures = Mapping[str, float | str]
"""Figures by name; a text where a figure is a word, such as the verdict ``lossless``."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run, as its tracker gets it at the beginning.

    Attributes:
        config: The resolved configuration and what was found out about the run, in nested sections. The values are
            numbers, texts, truth values and None.
        name: What distinguishes the run: its overrides.
        group: The sweep that it belongs to; None for a run of its own.
        command: The command that was run, such as ``"run"`` or ``"demo"``.
    """

    folder: Path
    config: Mapping[str, Any]
    name: str
    group: str | None
    command: str


class Tracker(Protocol):
    """Takes a run's results. No method raises, and none takes long: a tracker's failure is not the run's.

    A class that derives from this one inherits methods that do nothing.
    """

    def start(self, run: TrackedRun) -> None:
        """A run begins."""

    def progress(self, figures: Mapping[str, float], prompts: int) -> None:
        """The figures so far, after a number of prompts."""

    def curve(self, axis: str, lines: Mapping[str, Mapping[int, float]]) -> None:
        """Lines over a common axis that is not time: by name, the value at each place of the axis."""

    def summary(self, figures: Figures) -> None:
        """The run's final figures, by name."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table of the run, with a row per prompt."""

    def files(self, kind: str, paths: Sequence[Path]) -> None:
        """Files of the run: the ``"results"``, pictures included, or the ``"trace"``."""

    def finish(self, exit_code: int) -> None:
        """The run has ended: 0 if all went well, 130 after Ctrl-C, otherwise 1."""


class NullTracker(Tracker):
    """Tracks nothing."""
