"""MLflow itself: a run in a database of its own, read back with MLflow's own client; and without it."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.tracking.mlflow import MlflowTracker, allowed
from tests.experiments.tracking.everything import begin, end, use, warnings_of

# MLflow's tables are declared with an option that sqlalchemy 2.1 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database: MLflow takes seconds to make one."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install .[mlflow]")
    pytest.importorskip("sqlalchemy", reason="MLflow's database needs sqlalchemy: pip install .[mlflow]")
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{path}")
    return path


@pytest.fixture
def client(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a database of the test's own; files go below the test's folder, where the process is."""
    import mlflow

    shutil.copy(database, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")


def only_run(client: Any, experiment: str = "specdec") -> Any:
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def test_a_run_is_there(client: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    use(MlflowTracker("specdec", tags=["a/b"], timeout=120), tmp_path)
    assert warnings_of(caplog) == []
    run = only_run(client)
    assert run.info.run_name == "drafter=x"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "1", "drafter.component": "X"}
    tags = run.data.tags
    assert (tags["a/b"], tags["group"], tags["command"], tags["lossless"]) == ("true", "night", "run", "ties")
    assert run.data.metrics["speedup"] == 2.0
    history = client.get_metric_history(run.info.run_id, "speedup")
    assert [(each.step, each.value) for each in history] == [(1, 1.5), (2, 2.0), (2, 2.0)]
    curve = client.get_metric_history(run.info.run_id, "acceptance/unconditional")
    assert [(each.step, each.value) for each in curve] == [(1, 0.5), (2, 0.2), (3, 0.0)]
    artifacts = {each.path for each in client.list_artifacts(run.info.run_id)}
    assert artifacts == {"prompts.csv", "results"}, "and no trace, unless it is asked for"
    table = client.download_artifacts(run.info.run_id, "prompts.csv", str(tmp_path))
    assert Path(table).read_text().splitlines() == ["a,b", "1,x", "2,"]
    results = {each.path for each in client.list_artifacts(run.info.run_id, "results")}
    assert results == {"results/records.jsonl", "results/time.png"}


def test_runs_share_an_experiment(client: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        use(MlflowTracker("specdec", name=name, trace=True, timeout=120), tmp_path / name)
    runs = client.search_runs([client.get_experiment_by_name("specdec").experiment_id])
    assert {run.info.run_name for run in runs} == {"one", "two"}
    assert {each.path for each in client.list_artifacts(runs[0].info.run_id)} == {"prompts.csv", "results", "trace"}


@pytest.mark.parametrize(("exit_code", "status"), [(130, "KILLED"), (1, "FAILED")])
def test_a_run_that_did_not_end_well_says_so(client: Any, exit_code: int, status: str, tmp_path: Path) -> None:
    tracker = MlflowTracker("specdec", timeout=120)
    begin(tracker, tmp_path)
    end(tracker, tmp_path, exit_code)
    assert only_run(client).info.status == status


def test_a_database_that_cannot_be_opened_is_a_warning(
    client: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    use(MlflowTracker("specdec", uri=f"sqlite:///{tmp_path / 'file' / 'mlflow.db'}", timeout=120), tmp_path)
    assert len(warnings_of(caplog)) == 1
    assert "mlflow: " in warnings_of(caplog)[0]


def test_mlflow_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    use(MlflowTracker("specdec"), tmp_path)
    (warning,) = warnings_of(caplog)
    assert "mlflow: not installed (pip install 'specdec[mlflow]')" in warning


def test_names_that_mlflow_refuses() -> None:
    assert allowed("model/T=0.7/speedup") == "model/T_0.7/speedup"
    assert allowed("stage_seconds/verify: all") == "stage_seconds/verify: all"
