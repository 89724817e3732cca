"""Examples of projects; sweeps: how they end, grids of ablations, jobs that run elsewhere, and searches."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from drafters.corpus import Corpus
from drafters.ngram import NGramDrafter
from experiments.commands import settings
from experiments.config.sections import CONF
from specdec.target.loading import load_tokenizer
from tests.experiments.runs import launched
from tests.experiments.test_run import WrongRoot

pytestmark = pytest.mark.usefixtures("no_pictures")


def kept(tiny: list[str], *groups: str) -> list[str]:
    """The overrides of a tiny run for the jobs of a sweep, which have folders of their own; without some settings."""
    return [text for text in tiny if not text.startswith(("out=", *groups))]


def test_a_sweep_says_a_line_per_job_and_ends_with_the_comparison(tiny, tmp_path: Path, monkeypatch, capfd) -> None:
    """Of four jobs two fail, one is not lossless and one is as it should be: what there is stays, the sweep fails."""
    honest, broken = (f"{each.__module__}.{each.__name__}" for each in (NGramDrafter, WrongRoot))
    words = [*kept(tiny, "sampling"), "sampling.max_new_tokens=6", "drafter=ngram", "target.dtype=float32"]
    words += ["drafter.branches=0,1", f"drafter._target_={broken},{honest}", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    # A job of its own folder is found, too.
    words.append(f"out={tmp_path}/own/${{drafter.branches}}/${{drafter._target_}}")
    assert launched("-m", *words, monkeypatch=monkeypatch) == 1
    told = capfd.readouterr()
    lines = told.out.splitlines()
    jobs = [line for line in lines if line.startswith("job ")]
    assert ["NO RESULT" in line for line in jobs] == [True, True, False, False]
    # What all jobs share is not repeated.
    assert jobs[3].startswith(f"job 4, drafter.branches=1 drafter._target_={honest}") and "speedup " in jobs[3]
    assert told.err.count("error: branches=0") == 2 and told.err.count("error: ngram: NOT LOSSLESS") == 1
    assert told.err.count("error: ") == 4, "and one for the sweep"
    assert len(lines) + len(told.err.splitlines()) < 50, "it fits a screen"
    found = json.loads((tmp_path / "sweep" / "comparison.json").read_text())
    verdicts = {row["name"].partition("drafter._target_=")[2]: row["lossless"] for row in found["rows"]}
    assert verdicts == {broken: "not lossless", honest: "equal"}
    assert len([note for note in found["notes"] if "NO RESULT of job" in note and "drafter.branches=0" in note]) == 2
    assert any(f"{broken}: NOT LOSSLESS: 3 of 3" in note for note in found["notes"])
    # The details are with the job.
    assert json.loads((tmp_path / "own" / "1" / honest / "summary.json").read_text())["complete"]


def test_the_grid_of_an_ablation_has_settings_that_there_are() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for path in sorted((CONF / "experiment").glob("ablate_*.yaml")):
            params = compose("run", [f"experiment={path.stem}"], return_hydra_config=True).hydra.sweeper.params
            first = {name: str(values).partition(",")[0] for name, values in params.items() if "[" not in str(values)}
            words = [f"{name}={value}" for name, value in first.items()]
            assert words and compose("run", [f"experiment={path.stem}", *words]), "the first value of each composes"


@pytest.mark.full
@pytest.mark.parametrize(("extra", "where"), [("joblib", "processes"), ("submitit", "submitit_local"), ("ray", "ray")])
def test_a_sweep_elsewhere_ends_like_one_here(extra: str, where: str, tiny, tmp_path: Path, monkeypatch, capfd) -> None:
    """Two jobs, of which one fails: the other has its results, the table names both, and the exit code is 1."""
    pytest.importorskip(f"hydra_plugins.hydra_{extra}_launcher", reason=f"the extra {extra} is not installed")
    folder = tmp_path / "sweep"
    words = ["-m", f"hydra/launcher={where}", *["+hydra.launcher.ray.init.num_cpus=1"] * (extra == "ray")]
    words += [*kept(tiny, "dataset.count"), f"hydra.sweep.dir={folder}", "engine.max_length=200", "dataset.count=1"]
    assert launched(*words, "drafter=ngram", "drafter.branches=1,0", monkeypatch=monkeypatch) == 1
    shown = capfd.readouterr()
    assert "error: 1 of 2 jobs failed: error.txt of 1 in" in shown.err
    written = (folder / "1" / "error.txt").read_text()
    assert written.startswith("branches=0: ") and "\n\nTraceback" in written
    assert "NO RESULT of job 1 (drafter.branches=0" in " ".join(shown.out.split())
    assert len(json.loads((folder / "comparison.json").read_text())["rows"]) == 1


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # Optuna 2.10, which the plugin asks for, uses what SQLAlchemy deprecates
def test_a_search_maximizes_the_objective(saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra optuna is not installed")
    folder = tmp_path / "sweep"
    words = ["hydra.sweeper.n_trials=4", "hydra.sweeper.max_failure_rate=1", "objective=mean_acceptance_length"]
    words += ["hydra.sweeper.params={drafter.shape:'choice(1,[2,1])'}", f"drafter.name={saved / 'drafter'}"]
    words += [*kept(tiny), f"hydra.sweep.dir={folder}", "engine.max_length=200"]
    assert launched("experiment=fastest_shape", *words, monkeypatch=monkeypatch) == 0
    best: Any = OmegaConf.load(folder / "optimization_results.yaml")
    rows = json.loads((folder / "comparison.json").read_text())["rows"]
    assert len(rows) == 4
    assert best.best_value == max(row["mean_acceptance_length"] for row in rows)
    assert best.best_params["drafter.shape"] in ("1", "[2,1]")
    config: Any = OmegaConf.create({"objective": "speedup", "method": "none"})
    with pytest.raises(ValueError, match=r"^objective=speedup: "):
        settings.objective(config, SimpleNamespace(rows=[{"method": "none", "speedup": None}]))


ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the project, as the working directory; its modules are forgotten afterwards."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "examples" / "project", folder, ignore=shutil.ignore_patterns("__pycache__", "outputs"))
    monkeypatch.chdir(folder)
    # A console script has no working directory.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


@pytest.mark.full
def test_a_projects_components_are_run_replayed_and_compared(project: Path, tiny, monkeypatch, capsys: Any) -> None:
    """Also where a file of the project is named like a package: the working directory is searched last."""
    (project / "verifiers.py").write_text("raise RuntimeError('this is not the package verifiers')\n")
    small = [*kept(tiny, "dataset"), "dataset.count=2", "engine.max_length=256"]
    components = ["drafter=repeat", "verifier=cautious", "dataset=signatures", "trace=true", "out=outputs/first"]
    rules = "verifiers=[rejection,cautious,{name: cautious, most: 1}]"
    for command, words in (
        (settings.run, [*components, *small]),
        (settings.check, ["verifier=cautious", "vocab=2", "tables=1", "temperatures=[1]"]),
        (settings.replay, ["outputs/first", rules, "bootstrap.resamples=100"]),
        (settings.run, ["experiment=repeat_or_model", "drafter=repeat,none", *small]),
    ):
        assert launched(*words, "--config-dir", "conf", monkeypatch=monkeypatch, main=command.main) == 0
    assert "most=1" in capsys.readouterr().out
    (sweep,) = (project / "outputs" / "repeat_or_model").iterdir()
    assert "repeat" in (sweep / "comparison.md").read_text()


@pytest.mark.full
def test_its_own_tests_pass(project: Path) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    drafter = project / "mine" / "drafter.py"
    drafter.write_text(drafter.read_text().replace("*followed, *[root]", "*followed[::-1], *[-1]"))
    done = subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "the drafter breaks its contract" in done.stdout


def test_a_corpus_is_made_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    (tmp_path / "a.txt").write_text("import os\n")
    out = tmp_path / "a.corpus"
    tokens = import_module("corpus").make(out, [f"{tmp_path}/*.txt"], "bundled/target").tokens.tolist()
    tokenizer = load_tokenizer("bundled/target")
    assert tokenizer is not None
    assert tokens == [*tokenizer("import os\n", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert Corpus.open(out).tokens.tolist() == tokens
