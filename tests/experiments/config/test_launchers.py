"""Sweeps whose jobs run elsewhere, and sweeps that search; each where its plugin is installed."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from experiments.config.launch import sentence
from experiments.run import main, objective, run
from tests.experiments.runs import local

Configure = Callable[..., DictConfig]
Sweep = Callable[..., tuple[int, Path]]


def plugin(name: str, extra: str) -> None:
    pytest.importorskip(f"hydra_plugins.{name}", reason=f"the extra {extra} is not installed")


@pytest.fixture
def sweep(saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Runs a sweep of tiny jobs; returns its exit code and folder."""

    def swept(*words: str) -> tuple[int, Path]:
        kept = [text for text in tiny if not text.startswith("out=")]
        folder = tmp_path / "sweep"
        more = [f"hydra.sweep.dir={folder}", "engine.max_length=200", "dataset.count=2"]
        monkeypatch.setattr(sys, "argv", ["run.py", *words, *kept, *more])
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0), folder
        return 0, folder

    return swept


@pytest.mark.parametrize(
    ("name", "extra", "words"),
    [
        ("hydra_joblib_launcher", "joblib", ["hydra/launcher=processes", "hydra.launcher.n_jobs=1"]),
        pytest.param(
            *("hydra_joblib_launcher", "joblib", ["hydra/launcher=processes"]), marks=pytest.mark.full, id="2 processes"
        ),
        pytest.param(
            *("hydra_submitit_launcher", "submitit", ["hydra/launcher=submitit_local"]), marks=pytest.mark.full
        ),
        pytest.param(
            *("hydra_ray_launcher", "ray", ["hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=1"]),
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_sweep_elsewhere_ends_like_one_here(
    name: str, extra: str, words: list[str], sweep: Sweep, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two jobs, of which one fails: the other has its results, the table names both, and the exit code is 1."""
    plugin(name, extra)
    code, folder = sweep("-m", "drafter=ngram", "drafter.branches=1,0", *words)
    shown = capfd.readouterr()
    assert code == 1
    assert "error: 1 of 2 jobs failed: error.txt of 1 in" in shown.err
    assert (folder / "0" / "summary.json").exists() and not (folder / "0" / "error.txt").exists()
    written = (folder / "1" / "error.txt").read_text()
    assert written.startswith("branches=0: give at least 1, which drafts chains\n\nTraceback")
    text = " ".join(shown.out.split())
    assert "NO RESULT of job 1 (drafter.branches=0" in text
    assert "): branches=0: give at least 1" in text
    assert len(json.loads((folder / "comparison.json").read_text())["rows"]) == 1


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # Optuna 2.10, which the plugin asks for, uses what SQLAlchemy deprecates
def test_a_search_maximizes_the_objective(sweep: Sweep, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin("hydra_optuna_sweeper", "optuna")
    words = ["hydra.sweeper.n_trials=4", "hydra.sweeper.max_failure_rate=1", "objective=mean_acceptance_length"]
    shapes = "hydra.sweeper.params={drafter.shape:'choice(1,[2,1])'}"
    code, folder = sweep("experiment=fastest_shape", *words, shapes, f"drafter.name={saved / 'drafter'}")
    assert code == 0, capsys.readouterr().err
    best: Any = OmegaConf.load(folder / "optimization_results.yaml")
    rows = json.loads((folder / "comparison.json").read_text())["rows"]
    assert len(rows) == 4
    found = [row["mean_acceptance_length"] for row in rows]
    assert best.best_value == max(found)
    assert best.best_params["drafter.shape"] in ("1", "[2,1]")


def test_the_objective_is_the_methods_figure(
    configure: Configure, saved: Path, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure("run", *tiny, *local(saved, "model"), "objective=speedup", "dataset.count=1")
    summary = run(config)
    for config.objective in ("speedup", "tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate"):
        plain, ours = (getattr(method, config.objective) for method in summary.methods)
        assert objective(config, summary) == ours != plain
    config.objective = None
    assert objective(config, summary) is None


def test_a_missing_plugin_is_named() -> None:
    option = "hydra/launcher/submitit_slurm"
    error = MissingConfigException(f"Could not load '{option}'", missing_cfg_file=option)
    assert sentence(error) == f"{option} is not installed: pip install 'specdec-research[submitit]'"
