"""A sweep says one line per job."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments.config.launch import launch
from experiments.run import run
from experiments.sweep.lines import jobs_of


def config(*overrides: str, **sweeper: Any) -> Any:
    return OmegaConf.create({"hydra": {"sweeper": sweeper, "overrides": {"task": list(overrides)}}})


@pytest.mark.parametrize(
    ("overrides", "sweeper", "total", "fixed"),
    [
        (["a=1,2", "b=x,y,z", "c=3"], {}, 6, {"c=3"}),
        (["a=[1,2],[3]", "b=range(4)"], {"params": None}, 8, set()),
        (["a=7"], {"params": {"a": "1,2,3", "b": "1,2"}}, 2, {"a=7"}),  # the command line replaces the file's
        (["a=interval(0,1)"], {"n_trials": 12}, 12, set()),  # a search, by another sweeper
        (["a=glob(*)"], {}, None, set()),
    ],
)
def test_how_many_jobs(overrides: list[str], sweeper: dict[str, Any], total: int | None, fixed: set[str]) -> None:
    assert jobs_of(config(*overrides, **sweeper)) == (total, fixed)


def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *overrides: str) -> int:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *arguments, **more: None)
    monkeypatch.setattr(sys, "argv", ["run", "-m", f"hydra.sweep.dir={tmp_path / 'sweep'}", *overrides])
    try:
        launch(run, "run")
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_sweep_says_a_line_per_job_and_fits_a_screen(
    tiny: list[str], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [text for text in tiny if not text.startswith("out=")]
    given += ["drafter=ngram", "drafter.max_draft_tokens=1,2,30", "sampling.temperature=0,1", "dataset.count=2"]
    assert sweep(monkeypatch, tmp_path, *given, "drafter.max_draft_tokens=1,2,0") == 1
    told = capfd.readouterr()
    lines = told.out.splitlines()
    assert lines[0] == f"6 jobs into {tmp_path / 'sweep'}"
    jobs = [line for line in lines if line.startswith("job ")]
    assert len(jobs) == 6
    # What all jobs share is not repeated.
    assert jobs[0].startswith("job 1 of 6, drafter.max_draft_tokens=1 sampling.temperature=0: length ")
    assert "speedup " in jobs[0]
    assert "tokens/s" in jobs[0]
    assert " left" in jobs[0]
    assert " left" not in jobs[-1]
    assert ["NO RESULT" in line for line in jobs] == [False] * 4 + [True] * 2
    assert told.err.count("error: max_draft_tokens=0") == 2
    assert told.err.count("error: ") == 3  # and one for the sweep
    assert len(lines) + len(told.err.splitlines()) < 50, "six jobs fit a screen"
    # The details are with the job.
    tables = (tmp_path / "sweep" / "0" / "tables.txt").read_text()
    assert "mean acceptance length" in tables
    assert "draft acceptance rate" in tables
    assert json.loads((tmp_path / "sweep" / "0" / "summary.json").read_text())["complete"]


def test_a_single_run_shows_its_tables_and_keeps_them(
    tiny: list[str], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *arguments, **more: None)
    monkeypatch.setattr(sys, "argv", ["run", *tiny, "drafter=ngram", "progress_every=1"])
    launch(run, "run")
    told = capfd.readouterr()
    assert "draft acceptance rate" in told.out
    kept = (tmp_path / "out" / "tables.txt").read_text().strip()
    before, same, _ = told.out.partition(kept)
    assert same, "what is kept is what was shown"
    assert before.startswith("Memory in MB"), "shown before anything is loaded, and kept with the truth beside it"
    assert "Memory in MB" in kept
    assert [line.split(",")[0] for line in told.err.splitlines()] == [f"{n} of 3 prompts" for n in (1, 2, 3)]
