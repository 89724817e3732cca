"""Folders of runs that nobody ran."""

import json
from pathlib import Path
from typing import Any

from experiments.results.records import Record, RecordWriter
from experiments.results.runs import Run, load_run


def made(folder: Path, *overrides: str, prompts: int = 3, **facts: object) -> Path:
    """The folder of a run that nobody ran."""
    temperature = next((float(o.rpartition("=")[2]) for o in overrides if "sampling.temperature" in o), 0.0)
    manifest: dict[str, Any] = {
        "config": {
            "dataset": {"_target_": "experiments.datasets.stdlib.Stdlib", "seed": 0},
            "bootstrap": {"confidence": 0.95, "resamples": 100, "seed": 0},
            "engine": {"max_batch_size": 1},
        },
        "target": {"name": "bundled/target"},
        "prompts": prompts,
        "prompts_hash": "abc",
        "dtype": "float32",
        "device": "a processor",
        "planned": 3,
        "series": 2,
        "overrides": list(overrides),
        "git": {"commit": "0123456789abcdef", "dirty": False},
    }
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest | facts))
    with RecordWriter(folder / "records.jsonl") as writer:
        for number in range(prompts):
            for method in ("plain", "model"):
                accepted = (0,) * 6 if method == "plain" else (2, 1, number % 2)
                writer.write(
                    Record(
                        prompt=f"p{number}",
                        method=method,
                        exactness=None if method == "plain" else "exact",
                        temperature=temperature,
                        batch=number,
                        prompt_tokens=5,
                        token_ids=tuple(range(6)),
                        finish_reason="length",
                        seconds=2.0 if method == "plain" else 1.0 + number / 10,
                        accepted=accepted,
                        expected_accepted=tuple(map(float, accepted)),
                        proposed_depth=(2,) * len(accepted) if method == "model" else (0,) * 6,
                        proposed_nodes=(4,) * len(accepted) if method == "model" else (0,) * 6,
                    )
                )
    return folder


def loaded(folder: Path, *overrides: str, **facts: Any) -> Run:
    return load_run(made(folder, *overrides, **facts))
