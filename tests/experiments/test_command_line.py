"""The run command: bad input is one sentence before any work, exit codes, sweeps, and once from a shell."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.config.launch import sentence
from experiments.results.records import read_records
from experiments.run import run
from tests.experiments.runs import Configure, Stop, invoke, local, summary_file

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "bad", ["engine.prefill_chunk=0", "bootstrap.resamples=1", "tracker.mode=1", "target.quantization=8", "seed=-1"]
)
def test_bad_settings_are_refused_before_a_model_is_loaded(
    bad: str, configure: Configure, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object, **more: object) -> None:
        pytest.fail("a model was loaded before the settings were checked")

    monkeypatch.setattr("specdec.target.target.load", load)
    monkeypatch.setattr("drafters.model.load_model", load)
    config = configure("run", *tiny, "method=model", "tracker=wandb", bad)
    with pytest.raises(ValueError, match=f"{bad.split('=')[0]}"):
        run(config)
    assert not (tmp_path / "out").exists()


def test_tracebacks_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="warmup_prompts=-1"):
        invoke("warmup_prompts=-1", monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_other_errors_are_named_by_type() -> None:
    assert sentence(KeyError("x\ny")) == "KeyError: 'x\\ny' (HYDRA_FULL_ERROR=1 shows the whole traceback)"
    assert sentence(ValueError("a\n  b")) == "a b"


def test_ctrl_c_exits_with_130(
    saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    Stop(monkeypatch, KeyboardInterrupt(), {3})
    code = invoke(*tiny, *local(saved, "ngram"), monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert code == 130
    assert len(read_records(tmp_path / "out" / "records.jsonl")) == 2
    assert "INCOMPLETE" in capsys.readouterr().out


def test_a_sweep_goes_on_after_a_bad_job(
    saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    sweep = [f"hydra.sweep.dir={tmp_path / 'sweep'}", "hydra.sweep.subdir=${hydra.job.num}", "drafter.branches=0,1"]
    kept = [text for text in tiny if not text.startswith("out=")]
    code = invoke("-m", *kept, "drafter=ngram", *sweep, monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert code == 1
    assert "error: branches=0: give at least 1" in capsys.readouterr().err
    assert not (tmp_path / "sweep" / "0" / "summary.json").exists()
    assert summary_file(tmp_path / "sweep" / "1")["complete"]
    again = invoke("-m", *kept, "drafter=ngram", *sweep, monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert again == 1 and "holds the results of another run" in capsys.readouterr().err
    assert [path.parent.name for path in (tmp_path / "sweep").glob("*/error.txt")] == ["0"], "1 is as good as it was"


def test_from_the_shell(saved: Path, tiny: list[str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "experiments.run",
        *tiny,
        *local(saved, "ngram"),
        f"hydra.run.dir={tmp_path / 'hydra'}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "mean acceptance length" in done.stdout
    assert summary_file(tmp_path / "out")["complete"]
