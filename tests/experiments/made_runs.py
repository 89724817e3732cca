"""Folders of runs that nobody ran."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.results.frame import frame_of
from experiments.results.records import Record, begin_records
from experiments.results.runs import Run, load_run
from experiments.results.statistics import Bootstrap
from experiments.results.summary import summarize
from tests.experiments.results.outputs import output


def manifest_of(
    *overrides: str, prompts: int = 3, config: Mapping[str, Mapping[str, Any]] | None = None, **facts: object
) -> dict[str, Any]:
    """The manifest of a run on three prompts; ``config`` has what sections have besides, or instead."""
    sections: dict[str, Mapping[str, Any]] = {
        "dataset": {"_target_": "experiments.datasets.stdlib.Stdlib", "seed": 0},
        "bootstrap": {"confidence": 0.95, "resamples": 100, "seed": 0},
        "engine": {"max_batch_size": 1},
    }
    return {
        "config": sections | {name: {**sections.get(name, {}), **more} for name, more in (config or {}).items()},
        "target": {"name": "bundled/target"}, "prompts": prompts, "prompts_hash": "abc", "dtype": "float32",
        "device": "a processor", "planned": 3, "series": 2, "overrides": list(overrides),
        "git": {"commit": "0123456789abcdef", "dirty": False},
    } | facts  # fmt: skip


def made(
    folder: Path, *overrides: str, prompts: int = 3, records: Iterable[Record] | None = None, **facts: Any
) -> Path:
    """The folder of a run with these records, or with those of plain decoding and ``model``."""
    temperature = next((float(o.rpartition("=")[2]) for o in overrides if "sampling.temperature" in o), 0.0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest_of(*overrides, prompts=prompts, **facts)))
    written = [] if records is None else list(records)
    for number in range(prompts) if records is None else ():
        shared: dict[str, Any] = {"tokens": 6, "temperature": temperature, "batch": number}
        written.append(output(f"p{number}", "plain", seconds=2.0, accepted=(0,) * 6, **shared))
        drafted = {"accepted": (2, 1, number % 2), "proposed_depth": (2,) * 3, "proposed_nodes": (4,) * 3}
        written.append(output(f"p{number}", "model", seconds=1.0 + number / 10, **drafted, **shared))
    begin_records(folder / "records.jsonl", written)
    return folder


def run_of(records: Iterable[Record], **more: Any) -> Run:
    """A run that has these records, and no folder."""
    outputs = frame_of(records)
    settings = {"planned": 2, "bootstrap": Bootstrap(resamples=200)} | more
    return Run(Path("x"), manifest_of(), summarize(outputs, **settings), outputs)


def loaded(folder: Path, *overrides: str, **facts: Any) -> Run:
    return load_run(made(folder, *overrides, **facts))
