"""Folders of runs that nobody ran."""

import json
from pathlib import Path
from typing import Any

from experiments.results.records import RecordWriter
from experiments.results.runs import Run, load_run
from tests.experiments.results.outputs import output


def made(folder: Path, *overrides: str, prompts: int = 3, **facts: object) -> Path:
    """The folder of a run that nobody ran."""
    temperature = next((float(o.rpartition("=")[2]) for o in overrides if "sampling.temperature" in o), 0.0)
    manifest: dict[str, Any] = {
        "config": {
            "dataset": {"_target_": "experiments.datasets.stdlib.Stdlib", "seed": 0},
            "bootstrap": {"confidence": 0.95, "resamples": 100, "seed": 0},
            "engine": {"max_batch_size": 1},
        },
        "target": {"name": "bundled/target"}, "prompts": prompts, "prompts_hash": "abc", "dtype": "float32",
        "device": "a processor", "planned": 3, "series": 2, "overrides": list(overrides),
        "git": {"commit": "0123456789abcdef", "dirty": False},
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest | facts))
    with RecordWriter(folder / "records.jsonl") as writer:
        for number in range(prompts):
            shared = {"tokens": 6, "temperature": temperature, "batch": number}
            writer.write(output(f"p{number}", "plain", seconds=2.0, accepted=(0,) * 6, **shared))
            drafted = {"accepted": (2, 1, number % 2), "proposed_depth": (2,) * 3, "proposed_nodes": (4,) * 3}
            writer.write(output(f"p{number}", "model", seconds=1.0 + number / 10, **drafted, **shared))
    return folder


def loaded(folder: Path, *overrides: str, **facts: Any) -> Run:
    return load_run(made(folder, *overrides, **facts))
