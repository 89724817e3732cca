"""``experiments.show``: the right output, its tokens marked or colored, and its drafts."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.show import main, show
from tests.experiments.conftest import called
from tests.experiments.showcase import HOSTILE, write_run

Shown = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("show") / "run")


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """What the command prints of a folder."""

    def printed(*words: str | Path) -> str:
        called(show, *map(str, words))
        return capsys.readouterr().out

    return printed


def test_without_a_prompt_they_are_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["show.py", str(folder)])
    main()
    out = capsys.readouterr().out
    assert [line.split()[1:4:2] for line in out.splitlines() if " p" in line and "c" in line][1:] == [
        ["0", "p0"], ["1", "p1"],
    ]  # fmt: skip
    assert "add prompt=NUMBER or prompt=ID" in out


def test_an_output_with_marks(folder: Path, shown: Shown) -> None:
    out = shown(folder, "prompt=1")
    assert shown(folder, "prompt=p1") == out
    assert "model on p1, temperature 1" in out
    assert "7 tokens in 3 rounds: 2.33 tokens per target forward; ended by length" in out
    text = out.replace("\n", "")
    assert f"«{HOSTILE}»«▯»+→«" in text, "two accepted, the first byte of an arrow among them, and a bonus"
    assert f"»~<b>«{HOSTILE}»+ a" in text
    assert "plain on" not in out
    assert "recovered after a rejection" in out


def test_a_round_as_a_tree(folder: Path, shown: Shown) -> None:
    out = shown(folder, "prompt=0", "round=1")
    assert "round 1: 1 accepted (expected 1.00) of 3 drafted nodes" in out
    lines = [line.split("  p ")[0] for line in out.splitlines()]
    assert {"├── ✓ '\\n'", "│   ├── ✗ ' bad'", "│   └── → '<b>'  recovered", "└── ✗ ' bad'"} <= set(lines)
    assert "most likely after '\\n':" in out


def test_without_a_trace_and_where_it_diverges(tmp_path: Path, shown: Shown) -> None:
    for name in ("0", "1"):
        write_run(tmp_path / "sweep" / name, trace=name == "1", temperature=float(name == "0"))
    with pytest.raises(ValueError, match="is a sweep of 2 jobs"):
        shown(tmp_path / "sweep")
    out = shown(tmp_path / "sweep" / "0", "prompt=0")
    assert "No trace: drafts, rejected proposals, p and q are kept by experiments.run trace=true." in out
    with pytest.raises(ValueError, match="round=0: no trace"):
        shown(tmp_path / "sweep" / "0", "prompt=0", "round=0")
    out = shown(tmp_path / "sweep" / "1", "prompt=0")
    assert "leaves plain decoding at output token 3: margin 0.5000 nats, NOT explained by the dtype" in out
    assert "+→⟦differs from plain decoding from here⟧«" in out.replace("\n", "")
    assert "a tie of the dtype" in shown(tmp_path / "sweep" / "1", "prompt=1")
