"""The benchmarks' command line: what it reads and refuses; the arithmetic of rules."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiments.bench import verifiers
from experiments.bench.__main__ import main
from experiments.bench.options import help_text, option, parse
from experiments.bench.timing import in_turns, timed
from experiments.bench.verifiers import pays


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
        ("x=6", "there is no x: choose among sizes, "),
        ("plain", "'plain' has no value"),
        ("repeats=1.5", "repeats=1.5"),
        ("sizes=[1,0]", "sizes=[1,0]: give at least 1"),
        ("sizes=[1,x]", "sizes=[1,x]"),
        ("threads=none", "threads=none: give an integer or null"),
        ("fast=1", "fast=1"),
        ("only=[plan]", "only=[plan]: there is no plan: did you mean plain?"),
    ],
)
def test_bad_input_is_one_sentence(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        parse(Options, [word])


@pytest.mark.parametrize("words", ["sped", "speed repeat=6"])
def test_an_error_ends_the_command(words: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *words.split()])
    with pytest.raises(SystemExit, match="1"):
        main()
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words.split()[-1].partition("=")[0] in error


def test_help_shows_every_option_with_its_default() -> None:
    text = help_text(verifiers.Options, verifiers.__doc__)
    assert str(verifiers.__doc__).splitlines()[0] in text
    shown = [line.split()[0] for line in text.split("options:\n")[1].splitlines()]
    assert parse(verifiers.Options, shown) == verifiers.Options()


def test_sides_take_turns_and_a_call_is_timed_as_often_as_there_is_time() -> None:
    seen: list[str] = []
    times = in_turns([lambda: seen.append("a"), lambda: seen.append("b")], 2, warm_up=1)
    assert "".join(seen) == "abbaab" and [len(each) for each in times] == [2, 2]
    calls: list[int] = []
    timing = timed(lambda: calls.append(1), repeats=4, warm_up=2)
    assert timing["calls"] == 4 and len(calls) == 6 and 0 <= timing["best"] <= timing["seconds"]
    assert timed(lambda: None, repeats=9, limit=0.0)["calls"] == 1


@pytest.mark.parametrize(
    ("took", "accepted", "least"), [(0.002, 1.1, "20.00"), (0.001, 1.1, "always"), (0.002, 1.0, "never")]
)
def test_when_a_dearer_rule_pays(took: float, accepted: float, least: str) -> None:
    # 1 ms more for 0.1 tokens on top of 1 accepted and one more: 2 tokens in 20 ms are as many as 2.1 in 21 ms.
    row = {"rule": "block", "took": took, "accepted": accepted, "base_took": 0.001, "base_accepted": 1.0}
    assert pays(row) == least
