"""wandb's real client: offline, with its files read back; and online, with a server on this machine."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.tracking.wandb import WandbTracker
from tests.experiments.tracking.datastore import Datastore
from tests.experiments.tracking.everything import use, warnings_of
from tests.experiments.tracking.wandb_server import stand_in

pytest.importorskip("wandb", reason="wandb is not installed")

ROOT = Path(__file__).parents[3]


def child(folder: Path, mode: str = "offline", trouble: str = "", **environment: str) -> str:
    """What a process says that tells wandb of a run."""
    folder.mkdir(exist_ok=True)
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    clean |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "WANDB_DATA_DIR": str(home), **environment}
    done = subprocess.run(
        [sys.executable, "-m", "tests.experiments.tracking.child", str(folder), mode, trouble],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("DONE\n"), "the run went on to its end"
    return done.stdout


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
    said = child(tmp_path / "run", trouble="killed")
    assert Datastore(tmp_path / "run" / "next" / "wandb").summary["speedup"] == 2.0
    assert said.count("WARNING wandb: ") == 1
    assert "The run goes on without it" in said


def test_offline_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    said = child(tmp_path / "run", trouble="full disk")
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert file.stat().st_size <= 2000, "the disk was full for wandb, too"
    assert said.count("WARNING wandb: ") == 1
    assert "File too large. The run goes on without it" in said


def test_online_the_server_gets_it(tmp_path: Path) -> None:
    with stand_in() as server:
        said = child(tmp_path / "run", "online", WANDB_BASE_URL=server.url, WANDB_API_KEY="a" * 40)
    assert "WARNING" not in said
    begun = server.runs[0]
    assert (begun["project"], begun["displayName"], begun["groupName"], begun["jobType"]) == (
        *("p", "drafter=x"),
        *("night", "run"),
    )
    assert begun["tags"] == ["t"]
    assert '"drafter":{"value":{"component":"X"}}' in begun["config"]
    history = server.lines("wandb-history.jsonl")
    assert [(row["prompts_done"], row["speedup"]) for row in history if "speedup" in row] == [(1, 1.5), (2, 2)]
    assert server.lines("wandb-summary.json")[-1]["lossless"] == "ties"
    assert {kind for _, kind in server.artifacts} == {"run_table", "results", "trace"}
    assert any(name.startswith("media/images/pictures/time") for name in server.uploads)
    assert server.exit_code == 0


# A server that never answers costs the most time; the others cost some as well, and are tried in the full suite.
@pytest.mark.parametrize(
    "manner", ["stranger", *(pytest.param(name, marks=pytest.mark.full) for name in ("silent", "broken", "gone"))]
)
def test_online_without_a_server_that_works_it_is_recorded_offline(manner: str, tmp_path: Path) -> None:
    with stand_in("good" if manner == "gone" else manner) as server:
        environment = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}
        said = child(tmp_path / "run", "online", **environment) if manner != "gone" else ""
    if manner == "gone":  # nobody listens there any more
        said = child(tmp_path / "run", "online", **environment)
    assert said.count("WARNING") == 1
    assert "The run is recorded offline" in said
    found = Datastore(tmp_path / "run" / "wandb")
    assert found.summary["speedup"] == 2.0
    assert found.exit_code == 0


def test_online_without_a_key_it_is_recorded_offline(tmp_path: Path) -> None:
    with stand_in() as server:
        said = child(tmp_path / "run", "online", WANDB_BASE_URL=server.url)
    assert server.runs == []
    assert "The run is recorded offline" in said
    assert Datastore(tmp_path / "run" / "wandb").summary["speedup"] == 2.0


@pytest.mark.full
def test_what_was_recorded_offline_can_be_uploaded(tmp_path: Path) -> None:
    child(tmp_path / "run")
    (recorded,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    with stand_in() as server:
        environment: dict[str, Any] = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}
        environment |= {"HOME": str(tmp_path / "home"), "WANDB_DATA_DIR": str(tmp_path / "home")}
        subprocess.run(
            [sys.executable, "-m", "wandb", "sync", str(recorded)],
            env=environment,
            cwd=tmp_path,
            check=True,
            capture_output=True,
            timeout=100,
        )
    assert server.runs[0]["displayName"] == "drafter=x"
    assert server.lines("wandb-summary.json")[-1]["speedup"] == 2
    assert {kind for _, kind in server.artifacts} == {"run_table", "results", "trace"}
