"""wandb's real client, offline: its files are read back, and a killed service is a warning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.tracking.wandb import WandbTracker
from tests.experiments.tracking.datastore import Datastore
from tests.experiments.tracking.everything import use, warnings_of

pytest.importorskip("wandb", reason="wandb is not installed")

ROOT = Path(__file__).parents[3]


def test_offline_everything_is_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    use(WandbTracker("p", tags=["t"], trace=True, timeout=120), tmp_path)  # importing it can take long
    assert warnings_of(caplog) == []
    found = Datastore(tmp_path / "wandb")
    run = found.run
    assert (run.project, run.display_name, run.run_group, run.job_type) == ("p", "drafter=x", "night", "run")
    assert list(run.tags) == ["t"]
    assert found.config["seed"] == 1
    assert found.config["drafter"] == {"component": "X"}
    assert found.line("speedup") == [(1, 1.5), (2, 2.0)]
    assert found.line("acceptance/unconditional") == [(1, 0.5), (2, 0.2), (3, 0.0)]
    assert found.line("acceptance/conditional") == [(1, 0.5), (2, 0.4)]
    assert found.metrics["acceptance/conditional"] == ("position", ["none"]), "not in the summary"
    assert found.summary["speedup"] == 2.0
    assert found.summary["lossless"] == "ties"
    assert not [name for name in found.summary if name.startswith(("acceptance", "position", "prompts_done"))]
    kinds = {kind: sizes for _, kind, sizes in found.artifacts}
    assert kinds["results"] == {"records.jsonl": 3}
    assert kinds["trace"] == {"00000.parquet": 4}
    assert "prompts.table.json" in kinds["run_table"]
    assert [name for name in found.files if name.startswith("media/images/pictures/time")]
    assert found.exit_code == 0


@pytest.mark.full
def test_offline_a_service_that_is_killed_is_a_warning_and_the_next_run_is_recorded(tmp_path: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    own = {"HOME": str(folder), "PYTHONPATH": str(ROOT), "WANDB_DATA_DIR": str(folder)}
    words = [sys.executable, "-m", "tests.experiments.tracking.child", str(folder)]
    done = subprocess.run(words, cwd=folder, env=clean | own, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert said.endswith("DONE\n"), "the run went on to its end"
    assert Datastore(tmp_path / "run" / "next" / "wandb").summary["speedup"] == 2.0
    assert said.count("WARNING wandb: ") == 1
    assert "The run goes on without it" in said
