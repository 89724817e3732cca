"""The command: from a run's folder to a table and files, and what it refuses."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from omegaconf import DictConfig, OmegaConf

from experiments.accuracy import main
from experiments.config.sections import build
from experiments.datasets.prompt import choose, fingerprint
from experiments.results.records import Record, RecordWriter
from experiments.run import run as measure

Configure = Callable[..., DictConfig]

ROWS = [
    {"question_id": "m0", "question": "What is 1+1?", "answer": "Easy.\n#### 2"},
    {"question_id": "m1", "question": "What is 2+2?", "answer": "Easy.\n#### 4"},
    {
        "task_id": "HumanEval/0",
        "prompt": 'def f(x):\n    """One more."""\n',
        "entry_point": "f",
        "test": "def check(c):\n    assert c(1) == 2\n",
    },
    {"task_id": 7, "text": "Add.", "test_list": ["assert add(1, 2) == 3"], "test_setup_code": ""},
    {"question_id": "w", "prompt": "Write a poem."},
]
TEXTS = {
    "m0": ("It is 2.", "It is 2."),
    "m1": ("It is 4.", "It is 5."),
    "HumanEval/0": ("    return x + 1\n", "    return x\n"),
    "7": ("def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a + b\n"),
    "w": ("Roses", "Violets"),
}
"""What plain decoding and the method write."""


def made(folder: Path, rows: list[dict[str, Any]] | None = None, **sampling: Any) -> Path:
    """A run on a file with these rows, that nobody ran."""
    folder.mkdir()
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS))
    dataset = {
        "_target_": "experiments.datasets.jsonl.Jsonl",
        "file": str(folder / "q.jsonl"),
        "fields": ["question", "prompt", "text"],
    }
    prompts, _ = choose(build(OmegaConf.create({"dataset": dataset}), "dataset"))
    manifest = {
        "config": {"dataset": dataset, "sampling": {"n": 1} | sampling},
        "prompts_hash": fingerprint(prompts),
        "target": {"name": "org/model"},
        "dtype": "float32",
        "overrides": ["drafter=model", f"name={folder.name}"],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with RecordWriter(folder / "records.jsonl") as writer:
        for number, prompt in enumerate(prompts):
            for method, text in zip(("plain", "model"), TEXTS[prompt.id], strict=True):
                writer.write(
                    Record(
                        prompt=prompt.id,
                        method=method,
                        exactness=None if method == "plain" else "exact",
                        temperature=0.0,
                        batch=number,
                        prompt_tokens=3,
                        text=text,
                        finish_reason="length",
                    )
                )
    return folder


def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str) -> dict[str, Any]:
    """The command line; returns the rows of the report by benchmark and method."""
    words = (*words, f"out={tmp_path / 'out'}", f"hydra.run.dir={tmp_path / 'hydra'}", "bootstrap.resamples=200")
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *words])
    main()
    report = json.loads((tmp_path / "out" / "accuracy.json").read_text())
    return {f"{row['task']} {row['method']}": row for row in report["rows"]} | {"notes": report["notes"]}


def test_programs_are_run_only_if_somebody_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(*arguments: object) -> None:
        raise AssertionError("a program was run")

    monkeypatch.setattr("experiments.grading.sandbox.run", nobody)
    found = command(monkeypatch, tmp_path, f"runs={made(tmp_path / 'a')}")
    assert set(found) == {"gsm8k plain", "gsm8k model", "notes"}
    assert (found["gsm8k plain"]["accuracy"], found["gsm8k model"]["accuracy"]) == (1.0, 0.5)
    assert found["gsm8k model"]["difference"] == -0.5
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 outputs are programs, and were not graded: execute=true runs what the model wrote" in shown
    assert "GSM8K" in shown
    assert "-50.0" in shown


@pytest.mark.skipif(sys.platform != "linux", reason="programs are run on Linux only")
def test_all_benchmarks_in_all_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [f"runs={made(tmp_path / 'a')}", "execute=true", "seconds=5", "format=md,csv,latex,html,parquet"]
    found = command(monkeypatch, tmp_path, *given)
    assert {name: row["accuracy"] for name, row in found.items() if name != "notes"} == {
        "gsm8k plain": 1.0,
        "gsm8k model": 0.5,
        "humaneval plain": 1.0,
        "humaneval model": 0.0,
        "mbpp plain": 1.0,
        "mbpp model": 1.0,
    }
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        *(f"accuracy.{ending}" for ending in ("md", "csv", "tex", "html", "parquet", "json")),
        "grades.jsonl",
    }
    grades = [json.loads(line) for line in (out / "grades.jsonl").read_text().splitlines()]
    assert [(each["prompt"], each["why"]) for each in grades if not each["correct"]] == [
        ("m1", "found 5, expected 4"),
        ("HumanEval/0", "AssertionError:"),
    ]
    assert "| HumanEval | 0 | model | 1; 1 | 1 | 0.0% | -100.0 | 0; 1 |" in (out / "accuracy.md").read_text()
    table = pandas.read_parquet(out / "accuracy.parquet")
    assert list(table.columns[-4:]) == ["accuracy_low", "accuracy_high", "difference_low", "difference_high"]
    assert table.query("task == 'gsm8k' and method == 'model'").difference.item() == -0.5


def test_rows_of_several_runs_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    made(tmp_path / "a")
    made(tmp_path / "b")
    command(monkeypatch, tmp_path, f"runs=[{tmp_path / 'a'},{tmp_path / 'b'}]")
    shown = capsys.readouterr().out
    assert "name=a" in shown
    assert "name=b" in shown


def test_answers_may_come_from_the_original_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where prompts are passed around as conversations, with words around the question and without the answer."""
    questions = {"m0": "What is 1+1?", "m1": "What is 2+2?"}
    asked = [{"id": name, "turns": [f"{question} Think."]} for name, question in questions.items()]
    run = made(tmp_path / "a", asked)
    original = tmp_path / "original.jsonl"
    original.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert command(monkeypatch, tmp_path, f"runs={run}", f"answers={original}")["gsm8k model"]["accuracy"] == 0.5


POEMS = [{"question_id": "w", "prompt": "Write a poem."}]
CODE = [row for row in ROWS if "test" in row]


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        (POEMS, [], "q.jsonl, which {run} decoded, has no answers: give answers=FILE, the original file of GSM8K"),
        (POEMS, ["answers={run}/q.jsonl"], "q.jsonl has no answer to any prompt of {run}: give answers=FILE"),
        (POEMS, ["answers=nothing.jsonl"], "there is no file 'nothing.jsonl'"),
        (CODE, [], "all 2 answers are programs: execute=true runs what the model wrote, each program in a process"),
        (ROWS, ["k=2"], "k=2: pass@2 needs 2 samples of every prompt, and a run has sampling.n=1"),
        (ROWS, ["k=0"], "k=0: give an integer of at least 1, or a list of them"),
        (ROWS, ["execute=maybe"], "execute='maybe': give true or false"),
        (ROWS, ["seconds=0.5"], "seconds=0.5: give an integer of at least 1"),
        (ROWS, ["answers=1"], "answers=1: give a text, or null"),
    ],
)
def test_wrong_input_is_one_sentence(
    rows: list[dict[str, Any]],
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = made(tmp_path / "a", rows)
    with pytest.raises(SystemExit, match="1"):
        command(monkeypatch, tmp_path, f"runs={run}", *(word.format(run=run) for word in words))
    error = capsys.readouterr().err
    assert message.format(run=run) in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_file_that_has_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run = made(tmp_path / "a")
    path = run / "q.jsonl"
    path.write_text(path.read_text().replace("1+1", "1+2"))
    with pytest.raises(SystemExit, match="1"):
        command(monkeypatch, tmp_path, f"runs={run}")
    assert "no longer those of its dataset: its file has changed since the run" in capsys.readouterr().err


def test_a_real_run(
    configure: Configure, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A greedy exact method has plain decoding's very answers: no difference, and no doubt about it."""
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    given = [text for text in tiny if not text.startswith("dataset.")]
    given += ["dataset=gsm8k", f"dataset.file={tmp_path / 'q.jsonl'}", "drafter=ngram", "warmup_prompts=0"]
    measure(configure("run", *given, f"out={tmp_path / 'run'}", "method=ngram"))
    found = command(monkeypatch, tmp_path, f"runs={tmp_path / 'run'}")["gsm8k ngram"]
    assert (found["prompts"], found["difference"], found["difference_interval"]) == (2, 0.0, [0.0, 0.0])
