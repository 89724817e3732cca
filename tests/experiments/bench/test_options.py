"""The benchmarks' command line: what it reads, what it refuses, and that it needs no Hydra."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.bench import quantization, scaling, speed, startup, verifiers
from experiments.bench.__main__ import main
from experiments.bench.options import help_text, option, parse, read_options
from experiments.bench.paired import Checkout
from experiments.bench.rules import NAMES, make_rules
from experiments.bench.timing import in_turns
from specdec.interfaces import Verifier

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Options:
    sizes: tuple[int, ...] = option((1, 2), "how large", least=1)
    only: tuple[str, ...] = option((), "which", choices=("plain", "bundled"))
    repeats: int = option(3, "how often", least=1)
    threads: int | None = option(None, "threads")
    fast: bool = option(False, "hurry")
    limit: float = option(0.5, "how much")
    out: Path = option(Path("outputs"), "where")
    device: str = option("cpu", "on what")


def test_defaults() -> None:
    assert parse(Options, []) == Options()


def test_every_type_is_read() -> None:
    words = ["sizes=[3,4]", "only=[plain, bundled]", "repeats=6", "threads=2", "fast=true", "limit=1e-2", "out=a/b"]
    found = parse(Options, [*words, "device=cuda"])
    assert found == Options((3, 4), ("plain", "bundled"), 6, 2, True, 0.01, Path("a/b"), "cuda")
    assert parse(Options, ["threads=null", "sizes=5", "only=[]"]) == Options(sizes=(5,))
    assert parse(Options, ["repeats=6", "repeats=7"]).repeats == 7, "the last word counts"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("repeat=6", "there is no repeat: did you mean repeats?"),
        ("x=6", "there is no x: choose among sizes, only, repeats, "),
        ("plain", "'plain' has no value: give name=value, of sizes, only, "),
        ("--repeats=6", "there is no --repeats: did you mean repeats?"),
        ("repeats=many", "repeats=many: give an integer"),
        ("repeats=1.5", "repeats=1.5: give an integer"),
        ("repeats=0", "repeats=0: give at least 1"),
        ("sizes=[1,0]", r"sizes=[1,0]: give at least 1"),
        ("sizes=[1,x]", r"sizes=[1,x]: give a list of integers, such as [1,2]"),
        ("threads=none", "threads=none: give an integer or null"),
        ("fast=1", "fast=1: give true or false"),
        ("only=[plan]", "only=[plan]: there is no plan: did you mean plain?"),
    ],
)
def test_what_is_wrong_is_said(word: str, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole message follows)
        parse(Options, [word])
    assert str(error.value).startswith(message)


def test_an_error_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["speed.py", "repeat=6"])
    with pytest.raises(SystemExit, match="1"):
        read_options(Options, "A benchmark.")
    assert capsys.readouterr().err == "error: there is no repeat: did you mean repeats?\n"


@pytest.mark.parametrize("module", [quantization, scaling, speed, startup, verifiers])
def test_help_shows_every_option_with_its_default(module: object) -> None:
    text = help_text(module.Options, module.__doc__)  # type: ignore[attr-defined]
    assert "  repeats=" in text
    assert str(module.__doc__).splitlines()[0] in text
    # What help shows as default is what parsing it gives.
    shown = [line.split()[0] for line in text.split("options:\n")[1].splitlines()]
    assert parse(module.Options, shown) == module.Options()  # type: ignore[attr-defined]


def test_rules_are_those_of_the_configuration() -> None:
    rules = make_rules()
    assert set(rules) == set(NAMES) >= {"rejection", "block", "lenient"}
    assert all(isinstance(rule, Verifier) for rule in rules.values())


BLOCKED = """
import importlib, sys
for name in ("hydra", "omegaconf", "wandb", "pandas"):
    sys.modules[name] = None  # importing it raises ImportError
from experiments.bench import NAMES, rules
for name in NAMES:
    if name not in ("evidence", "gallery", "chapter"):  # of the documentation
        importlib.import_module(f"experiments.bench.{name}")
rules.make_rules()
sys.argv = ["bench", "speed", "--help"]
from experiments.bench.__main__ import main
main()
"""


def test_benchmarks_need_no_hydra() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "repeats=8" in done.stdout


def test_an_unknown_benchmark_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "sped"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err == "error: there is no benchmark 'sped': did you mean speed?\n"


def test_speed_names_its_workloads_and_refuses_a_folder_without_a_checkout(tmp_path: Path) -> None:
    assert list(speed.chosen(("n-gram", "110m"))) == ["n-gram, 110m, T=0, 1 rows"]
    with pytest.raises(ValueError, match=r"only=\['x'\]: no workload's name has these parts"):
        speed.chosen(("x",))
    with pytest.raises(ValueError, match="there is no checkout of this project"):
        Checkout(tmp_path, "cpu")


def test_sides_take_turns() -> None:
    seen: list[str] = []
    times = in_turns([lambda: seen.append("a"), lambda: seen.append("b")], 2, warm_up=1)
    assert "".join(seen) == "abbaab" and [len(each) for each in times] == [2, 2]
