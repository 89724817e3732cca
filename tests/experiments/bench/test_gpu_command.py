"""The command that runs everything a GPU can show: what it checks first, and what it runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from experiments.bench import gpu

ROOT = Path(__file__).parents[3]


def test_the_files_with_gpu_tests_are_found(tmp_path: Path) -> None:
    found = {path.relative_to(ROOT).as_posix() for path in gpu.gpu_tests()}
    assert {"tests/test_gpu.py", "tests/gpu/test_engine.py"} <= found
    assert not {"tests/test_lossless.py", "tests/experiments/bench/test_gpu_command.py"} & found
    (tmp_path / "test_a.py").write_text("pytestmark = pytest.mark.gpu\n")
    (tmp_path / "test_b.py").write_text("pytestmark = pytest.mark.gpus\n")
    assert [path.name for path in gpu.gpu_tests(tmp_path)] == ["test_a.py"]


def test_missing_packages_are_named_as_one_installs_them() -> None:
    assert gpu.missing() == []
    assert gpu.missing(["torch", "no_such_module"]) == ["no_such_module"]


def test_both_commands_run_in_this_python() -> None:
    tests, benchmark = gpu.commands([Path("tests/test_gpu.py")], ["seconds=60"])
    assert tests[:5] == [sys.executable, "-m", "pytest", "-m", "gpu"] and tests[-1].endswith("test_gpu.py")
    assert benchmark == [sys.executable, "-m", "experiments.bench", "engine", "seconds=60"]


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ([], "error: torch .* sees no GPU here: run it on a"),
        (["rich", "pytest"], "error: rich and pytest not installed"),
    ],
)
def test_it_says_what_is_missing(lacking: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setattr(gpu, "missing", lambda: lacking)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=message):
        gpu.main()


BLOCKED = """
import importlib.machinery
import sys
hidden = ("hydra", "omegaconf", "wandb", "beartype", "pandas", "pyarrow")
find = importlib.machinery.PathFinder.find_spec
class Find:
    def __call__(self, name, *more):
        return None if name.split(".")[0] in hidden else find(name, *more)
importlib.machinery.PathFinder.find_spec = Find()
import pytest
sys.exit(pytest.main(["-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.full
def test_the_gpu_tests_are_collected_without_the_packages_of_the_experiments() -> None:
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # hydra brings a plugin of pytest
    files = [str(path) for path in gpu.gpu_tests()]
    done = subprocess.run([sys.executable, "-c", BLOCKED, *files], cwd=ROOT, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_one_synchronization_per_round" in done.stdout
