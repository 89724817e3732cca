"""The interface of trackers. The results themselves are the files in the run's folder; a tracker only mirrors them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from experiments.results.comparison import commit_of

Figures = Mapping[str, float | str]
"""Figures by name; a text where a figure is a word, such as the verdict ``lossless``."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run at its beginning, with its ``flat_config``, named by its overrides; ``group`` is its sweep, if any."""

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


_NO_SETTINGS = ("out", "resume", "tracker", "experiment")
_FACTS = ("dtype", "device", "prompts", "prompts_hash", "exactness", "overrides", "versions")


def flat_config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration, and what its manifest says besides, in a form that runs can be grouped and filtered by.

    A component's ``_target_`` becomes ``component``, the bare name of its class. A list becomes the text that one
    would type on the command line. What does not change a result, such as the output folder, is left out.
    """
    config = {name: _flat(value) for name, value in manifest["config"].items() if name not in _NO_SETTINGS}
    config |= {name: _flat(manifest[name]) for name in _FACTS if name in manifest}
    for name, value in manifest.get("target", {}).items():
        if isinstance(config.get("target"), dict) and name != "name":  # as it was given, not as it was found
            config["target"][name] = _flat(value)
    return config | {"commit": commit_of(manifest)}


def _flat(value: Any) -> Any:
    if isinstance(value, Mapping):
        section = {str(name): _flat(inner) for name, inner in value.items() if not str(name).startswith("_")}
        if not value.get("_target_"):
            return section
        parts = str(value["_target_"]).split(".")  # the class in package.module.Class.method, or else the last name
        return {"component": next((part for part in parts if part[:1].isupper()), parts[-1]), **section}
    if isinstance(value, list | tuple):
        return json.dumps(value, separators=(",", ":"), default=str, ensure_ascii=False)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
