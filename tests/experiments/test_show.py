"""``experiments.show``: the right output, its tokens marked or colored, and its drafts."""

import contextlib
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from experiments.reporting.tokens import colored, output_view
from experiments.results.records import read_records
from experiments.results.texts import read_token_texts
from experiments.show import main
from experiments.tracing.outputs import outputs_of
from tests.experiments.showcase import HOSTILE, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """What the command prints, on both streams."""
    monkeypatch.setattr(sys, "argv", ["show.py", *words])
    with contextlib.suppress(SystemExit):  # after an error, which is on the second stream
        main()
    printed = capsys.readouterr()
    return printed.out, printed.err


def test_without_a_prompt_they_are_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = shown(monkeypatch, capsys, str(folder))
    assert [line.split()[1:4:2] for line in out.splitlines() if " p" in line and "c" in line][1:] == [
        ["0", "p0"], ["1", "p1"],
    ]  # fmt: skip
    assert "add prompt=NUMBER or prompt=ID" in out


@pytest.mark.parametrize("prompt", ["prompt=1", "prompt=p1"])
def test_an_output_with_marks(
    prompt: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = shown(monkeypatch, capsys, str(folder), prompt)
    assert "model on p1, temperature 1" in out
    assert "7 tokens in 3 rounds: 2.33 tokens per target forward; ended by length" in out
    text = out.replace("\n", "")
    assert f"«{HOSTILE}»«▯»+→«" in text, "two accepted, the first byte of an arrow among them, and a bonus"
    assert f"»~<b>«{HOSTILE}»+ a" in text
    assert "plain on" not in out
    assert "recovered after a rejection" in out


def test_a_round_as_a_tree(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = shown(monkeypatch, capsys, str(folder), "prompt=0", "round=1")
    assert "round 1: 1 accepted (expected 1.00) of 3 drafted nodes" in out
    lines = [line.split("  p ")[0] for line in out.splitlines()]
    assert "├── ✓ '\\n'" in lines
    assert "│   ├── ✗ ' bad'" in lines
    assert "│   └── → '<b>'  recovered" in lines
    assert "└── ✗ ' bad'" in lines
    assert "most likely after '\\n':" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prompt=3"], "error: prompt=3: the run has prompts 0 to 2"),
        (["prompt=p00"], "error: there is no prompt 'p00': did you mean p0?"),
        (["prompt=0", "method=modell"], "error: there is no method 'modell': did you mean model?"),
        (["prompt=0", "round=3"], "error: round=3: the output has rounds 0 to 2"),
        (["prompt=0", "temperature=0"], "error: temperature=0: the prompt's outputs have 1"),
        (["prompt=0", "method=plain", "round=0"], "error: round=0: the output has no drafts in the trace"),
    ],
)
def test_what_there_is_not_is_one_sentence(
    words: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(monkeypatch, capsys, str(folder), *words)[1] == f"{message}\n"


def test_folders_that_cannot_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("0", "1"):
        write_run(tmp_path / "sweep" / name, trace=False)
    assert "is a sweep of 2 jobs: give the folder of one" in shown(monkeypatch, capsys, str(tmp_path / "sweep"))[1]
    assert "has no manifest.json" in shown(monkeypatch, capsys, str(tmp_path))[1]
    assert "run has no value: give run=…, the folder of a run" in shown(monkeypatch, capsys)[1]
    assert "give one folder, not 2" in shown(monkeypatch, capsys, "a", "b")[1]
    words = (str(tmp_path / "sweep" / "0"), "prompt=0")
    out, _ = shown(monkeypatch, capsys, *words)
    assert "No trace: drafts, rejected proposals, p and q are kept by experiments.run trace=true." in out
    assert "round=0: no trace" in shown(monkeypatch, capsys, *words, "round=0")[1]


def test_a_divergence_is_shown_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", temperature=0.0)
    out, _ = shown(monkeypatch, capsys, str(folder), "prompt=0")
    assert "leaves plain decoding at output token 3: margin 0.5000 nats, NOT explained by the dtype" in out
    assert "+→⟦differs from plain decoding from here⟧«" in out.replace("\n", "")
    assert "a tie of the dtype" in shown(monkeypatch, capsys, str(folder), "prompt=1")[0]


def test_colors_where_the_terminal_has_them(folder: Path) -> None:
    records = [record for record in read_records(folder / "records.jsonl") if record.method == "model"]
    (output, *_), _ = outputs_of(folder, records)
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=100)
    assert colored(terminal)
    terminal.print(output_view(output, read_token_texts(folder), colors=True))
    text = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[38;2;255;255;255;48;2;0;90;142m" in text, "accepted at depth 1"
    assert "\x1b[38;2;255;255;255;48;2;0;79;124m▯" in text, "at depth 2 it is darker"
    assert "\x1b[38;2;0;0;0;48;2;230;159;0m<b>" in text, "recovered"
    assert "«" not in text
    plain = Console(file=io.StringIO(), force_terminal=True, no_color=True)
    assert not colored(plain)
    assert not colored(Console(file=io.StringIO()))
