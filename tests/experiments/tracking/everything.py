"""One run's story, told to a tracker through every method that trackers have."""

import logging
from pathlib import Path

import pytest
from matplotlib import image

from experiments.tracking.base import TrackedRun, Tracker


def use(tracker: Tracker, folder: Path) -> None:
    """Tell a tracker of a run of two prompts, with two files, a picture and a trace."""
    records, picture, trace = (folder / name for name in ("records.jsonl", "time.png", "00000.parquet"))
    records.write_text("{}\n")
    image.imsave(picture, [[0.0, 1.0], [1.0, 0.0]])
    trace.write_bytes(b"PAR1")
    config = {"seed": 1, "drafter": {"component": "X"}}
    tracker.start(TrackedRun(folder=folder, config=config, name="drafter=x", group="night", command="run"))
    tracker.progress({"speedup": 1.5}, 1)
    tracker.progress({"speedup": 2.0}, 2)
    tracker.summary({"speedup": 2.0, "lossless": "ties"})
    lines = {"unconditional": {1: 0.5, 2: 0.2, 3: 0.0}, "conditional": {1: 0.5, 2: 0.4}}
    tracker.curve("position", {f"acceptance/{name}": line for name, line in lines.items()})
    tracker.table("prompts", ["a", "b"], [[1, "x"], [2, None]])
    tracker.files("results", [records, picture])
    tracker.files("trace", [trace])
    tracker.finish(0)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What trackers have warned of."""
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in records if record.name.startswith("experiments.tracking")]
