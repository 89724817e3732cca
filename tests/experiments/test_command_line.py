"""The run command: bad input is one sentence before any work, exit codes, sweeps, and once from a shell."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.config.launch import sentence
from experiments.results.records import read_records
from tests.experiments.runs import Stop, invoke, local, summary_file

ROOT = Path(__file__).parents[2]


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


@pytest.mark.full  # the answers to questions and typing errors come from a shell, too
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
