"""Interrupted runs go on, and end as if nothing had happened."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from experiments.config.launch import launch
from experiments.results.records import read_records
from experiments.run import run
from specdec.engine.engine import Engine

Configure = Callable[..., DictConfig]
TIMES = (
    *("best_in", "seconds", "tokens_per_second", "speedup", "speedup_interval", "stage_seconds"),
    *("started", "resumed", "folder", "out", "load", "noise", "requests", "utilization"),
    *("arrived", "admitted", "prefilled", "finished", "emitted_at", "ingestion", "round_seconds"),
)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of a tiny run's time, and are tested elsewhere."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *arguments, **more: None)


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Presses Ctrl-C at the n-th call of ``Engine.generate`` that speculates; returns the calls, counted."""

    def stop(at: int) -> list[int]:
        original = Engine.generate
        calls = [0]

        def generate(engine: Engine, *arguments: Any, speculate: bool = True) -> Any:
            calls[0] += speculate
            if speculate and calls[0] == at:
                raise KeyboardInterrupt
            return original(engine, *arguments, speculate=speculate)

        monkeypatch.setattr(Engine, "generate", generate)
        return calls

    return stop


def timeless(value: Any) -> Any:
    """A result without what no two runs have alike."""
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in TIMES}
    if isinstance(value, list):
        return [timeless(inner) for inner in value if not str(inner).startswith("NOISY TIMINGS")]
    return value


def results(folder: Path) -> tuple[Any, Any]:
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return timeless(records), timeless(json.loads((folder / "summary.json").read_text()))


def chats(path: Path, *counts: int) -> list[str]:
    """A file of prompts with so many turns each, and the overrides that choose it."""
    rows = [{"turns": [f"{number} turn {turn}" for turn in range(count)]} for number, count in enumerate(counts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["dataset=jsonl", f"dataset.file={path}"]


NGRAM = ["drafter=ngram", "method=ngram"]


@pytest.mark.parametrize(
    ("more", "at"),
    [
        (["sampling.temperature=1", "dataset.count=4"], 4),  # after the warm-up and two prompts
        (["engine.max_batch_size=2", "sampling.n=3", "sampling.temperature=1"], 3),
        (["conversations"], 4),  # in the middle of one
    ],
)
def test_the_result_is_the_uninterrupted_one(
    more: list[str], at: int, configure: Configure, tiny: list[str], tmp_path: Path, capsys: Any, stop_at: Any
) -> None:
    given = [*tiny, *NGRAM, *more]
    if more == ["conversations"]:
        given = [text for text in tiny if not text.startswith("dataset.")] + NGRAM
        given += chats(tmp_path / "p.jsonl", 1, 2, 1, 2)
    run(configure("run", *given, f"out={tmp_path / 'whole'}"))
    calls = stop_at(at)
    with pytest.raises(KeyboardInterrupt):
        run(configure("run", *given))
    before = read_records(tmp_path / "out" / "records.jsonl")
    assert before
    with (tmp_path / "out" / "records.jsonl").open("a") as file:
        file.write('{"prompt": "half a li')  # as a crash would leave it
    done = calls[0]
    summary = run(configure("run", *given, "resume=true"))
    assert summary.complete
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    # What was finished did not run again: only the warm-up and the rest.
    whole = len(read_records(tmp_path / "whole" / "records.jsonl")) // 2
    assert calls[0] - done < whole + 1
    after = read_records(tmp_path / "out" / "records.jsonl")
    assert after[0].seconds == before[0].seconds
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["config"]["resume"] is False
    assert len(manifest["resumed"]) == 1


def test_prompts_that_do_not_fit_stay_failures(
    configure: Configure, tiny: list[str], tmp_path: Path, capsys: Any, stop_at: Any
) -> None:
    rows = [{"prompt": "x" * size} for size in (10, 100, 20, 30)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [text for text in tiny if not text.startswith("dataset.")]
    given += [*NGRAM, "dataset=jsonl", f"dataset.file={tmp_path / 'p.jsonl'}", "engine.max_length=64"]
    given.append("dataset.too_long=fail")
    run(configure("run", *given, f"out={tmp_path / 'whole'}"))
    stop_at(3)
    with pytest.raises(KeyboardInterrupt):
        run(configure("run", *given))
    run(configure("run", *given, "resume=true"))
    assert results(tmp_path / "out") == results(tmp_path / "whole")


def test_a_seed_left_to_chance_is_the_first_attempts(
    configure: Configure, tiny: list[str], tmp_path: Path, capsys: Any, stop_at: Any
) -> None:
    given = [*tiny, *NGRAM, "seed=null", "sampling.temperature=1"]
    stop_at(3)
    with pytest.raises(KeyboardInterrupt):
        run(configure("run", *given))
    seed = json.loads((tmp_path / "out" / "manifest.json").read_text())["config"]["seed"]
    run(configure("run", *given, "resume=true"))
    shutil.move(tmp_path / "out", tmp_path / "resumed")
    run(configure("run", *tiny, *NGRAM, f"seed={seed}", "sampling.temperature=1"))
    assert results(tmp_path / "resumed") == results(tmp_path / "out")


def test_a_complete_run_is_left_alone(
    configure: Configure, tiny: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(configure("run", *tiny, *NGRAM))
    files = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def load(*arguments: object, **more: object) -> None:
        pytest.fail("a model is loaded for nothing")

    monkeypatch.setattr("specdec.target.target.Target.from_pretrained", load)
    assert run(configure("run", *tiny, *NGRAM, "resume=true")) == first
    assert "complete already" in capsys.readouterr().out
    assert files == {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_what_cannot_be_resumed_is_one_sentence(
    configure: Configure, tiny: list[str], tmp_path: Path, capsys: Any, stop_at: Any
) -> None:
    with pytest.raises(ValueError, match=r"resume=true: there is no run in .*folder as out=FOLDER"):
        run(configure("run", *tiny, *NGRAM, "resume=true"))
    with pytest.raises(ValueError, match="resume='yes': give true or false"):
        run(configure("run", *tiny, *NGRAM, "resume=yes"))
    given = [text for text in tiny if not text.startswith("dataset.")] + NGRAM + chats(tmp_path / "p.jsonl", 1, 1, 1)
    stop_at(3)
    with pytest.raises(KeyboardInterrupt):
        run(configure("run", *given))
    with pytest.raises(ValueError, match="go on with resume=true"):
        run(configure("run", *given))
    before = (tmp_path / "out" / "records.jsonl").read_bytes()
    for more, message in (
        ("drafter.branches=1", r"had drafter\.branches=2, and this one has drafter\.branches=1"),
        ("sampling.max_new_tokens=13", r"had sampling\.max_new_tokens=12, and this one has"),
        ("+sampling.extra=1", r"had sampling\.extra=nothing, and this one has sampling\.extra=1"),
    ):
        with pytest.raises(ValueError, match=message):
            run(configure("run", *given, "resume=true", more))
    chats(tmp_path / "p.jsonl", 1, 1, 2)
    with pytest.raises(ValueError, match="had other prompts"):
        run(configure("run", *given, "resume=true"))
    assert (tmp_path / "out" / "records.jsonl").read_bytes() == before


# ---------------------------------------------------------------- sweeps


def sweep(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    """The exit code of a sweep in this process."""
    given = ["run.py", "-m", *arguments, f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=${hydra.job.num}"]
    monkeypatch.setattr(sys, "argv", given)
    try:
        launch(run, "run")
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.mark.full
def test_a_sweep_goes_on_after_its_finished_jobs_and_prompts(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, stop_at: Any
) -> None:
    given = [text for text in tiny if not text.startswith("out=")] + [*NGRAM, "drafter.branches=1,2,3"]
    assert sweep(monkeypatch, tmp_path / "whole", *given) == 0
    calls = stop_at(7)  # a warm-up and three prompts each: in the second job
    assert sweep(monkeypatch, tmp_path / "part", *given) == 130
    assert not (tmp_path / "part" / "2").exists()
    capsys.readouterr()
    assert sweep(monkeypatch, tmp_path / "part", *given, "resume=true") == 0
    assert calls[0] == 7 + 3 + 4, "the second job's warm-up and two prompts, and all of the third"
    for job in "012":
        assert results(tmp_path / "part" / job) == results(tmp_path / "whole" / job)
    # It ends with the comparison, as the first did.
    whole, part = (json.loads((tmp_path / name / "comparison.json").read_text()) for name in ("whole", "part"))
    assert timeless(whole) == timeless(part)
    assert sweep(monkeypatch, tmp_path / "none", *given, "resume=true") == 1
    assert "give the interrupted one's folder as hydra.sweep.dir=FOLDER" in capsys.readouterr().err
