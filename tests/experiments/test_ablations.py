"""How a sweep ends, and every ablation as one command."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.config.launch import launch
from experiments.config.sections import CONF
from experiments.run import run


@pytest.mark.usefixtures("no_pictures")
def test_a_sweep_ends_with_the_comparison_and_lists_failed_jobs(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [text for text in tiny if not text.startswith("out=")]
    # A job of its own folder is found, too.
    given += ["drafter=ngram", f"out={tmp_path}/own/${{drafter.branches}}", "drafter.branches=0,1,2"]
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", *given, f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    with pytest.raises(SystemExit, match="1"):
        launch(run, "run")
    found = json.loads((tmp_path / "sweep" / "comparison.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["ngram, drafter.branches=1", "ngram, drafter.branches=2"]
    (note,) = [note for note in found["notes"] if "NO RESULT of job 0 (" in note]
    assert "drafter.branches=0" in note
    shown = capsys.readouterr()
    assert "NO RESULT of job 0" in shown.out
    assert "error: branches=0" in shown.err


# The grid of each ablation, cut to a few jobs, and the rows and columns of its table. Drafters that need no model stand
# in for those that are swept, because the tiny drafting model's folder cannot be given to all of them.
ABLATIONS = {
    "drafter": ([], "drafter", "temperature"),
    "shape": (["drafter.shape=2,[2,1]"], "drafter.shape", "drafter.sampling"),
    "temperature": (["sampling.temperature=0,1"], "drafter", "temperature"),
    "quantization": (["target.dtype=float32"], "target.quantization", "drafter.quantization"),
    "kv_cache": ([], "engine.kv_cache", "drafter.kv_cache"),
    "context": (["dataset.tokens=8,12,16", "dataset.longest=16"], "dataset.tokens", "drafter"),
    "category": (["dataset.per_category=2", "dataset.only=[asyncio,email]"], "category", "drafter"),
}


def test_every_ablation_is_tried() -> None:
    names = {path.stem.removeprefix("ablate_") for path in (CONF / "experiment").glob("ablate_*.yaml")}
    assert names == {*ABLATIONS, "acceptance"}, "the last one has a test of its own, below"


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "name",
    [name if name in ("shape", "category") else pytest.param(name, marks=pytest.mark.full) for name in ABLATIONS],
)
def test_an_ablation_is_one_command(
    name: str, saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    own, row, column = ABLATIONS[name]
    stays = ("target", "bootstrap", "threads")
    given = [text for text in tiny if text.startswith(stays)]
    given += [f"experiment=ablate_{name}", *own, "dataset.count=1", "sampling.max_new_tokens=4", "warmup_prompts=0"]
    given += ["dataset.prompt_tokens=16"] if name != "context" else []
    if "drafter" not in (row, column):
        given.append(f"drafter.name={saved / 'drafter'}")
    else:
        given = [text for text in given if not text.startswith("drafter=")] + ["drafter=ngram,none"]
    monkeypatch.setattr(sys, "argv", ["run.py", *given, f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    launch(run, "run")
    assert "NO RESULT" not in capfd.readouterr().out
    file = "categories" if name == "category" else "two_way"
    heading = (tmp_path / "sweep" / f"{file}.csv").read_text().splitlines()[0].split(",")
    assert heading[: heading.index("mean_acceptance_length")][-2:] == [row, column]


@pytest.mark.full
@pytest.mark.usefixtures("no_pictures")
def test_the_sweep_over_batch_sizes_is_one_command(
    saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [text for text in tiny if not text.startswith("out=")]
    given += ["experiment=batch_sweep", f"drafter.name={saved / 'drafter'}", "target.inflate=null"]
    given += ["engine.max_length=128", "engine.max_batch_size=1,2", "dataset.count=4", "warmup_prompts=0"]
    monkeypatch.setattr(sys, "argv", ["run.py", *given, f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    launch(run, "run")
    curves = json.loads((tmp_path / "sweep" / "batch_sweep.json").read_text())["curves"]
    assert [curve["method"] for curve in curves] == ["plain", "model"]
    assert [[point["batch"] for point in curve["points"]] for curve in curves] == [[1, 2], [1, 2]]
    assert "Latency and throughput by batch size" in capsys.readouterr().out


@pytest.mark.usefixtures("no_pictures")
def test_the_acceptance_ablation_is_one_command(
    saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own grid, cut to one drafter and two shapes."""
    given = [text for text in tiny if not text.startswith("out=")]
    given += [
        "experiment=ablate_acceptance",
        "drafter=model",
        f"drafter.name={saved / 'drafter'}",
        "engine.max_length=128",
    ]
    given += ["drafter.shape=2,[2,1]", "dataset.count=1", "sampling.max_new_tokens=4", "warmup_prompts=0"]
    monkeypatch.setattr(sys, "argv", ["run.py", *given, f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    launch(run, "run")
    rows = json.loads((tmp_path / "sweep" / "comparison.json").read_text())["rows"]
    assert [(row["temperature"], row["name"]) for row in rows] == [
        (temperature, f"model, drafter.shape={shape}") for temperature in (0, 1) for shape in ("2", "[2,1]")
    ]
