"""Interrupted runs go on, and end as if nothing had happened."""

import json
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from experiments.config.sections import plain_whole
from experiments.results.manifest import write_manifest
from experiments.results.records import read_records
from experiments.run import run
from experiments.session.methods import check_components
from experiments.session.resume import begun
from tests.experiments.runs import Configure, Stop, launched
from tests.models import tiny_model

TIMES = (
    "best.", "seconds", "tokens_per_second", "speedup", "stage_", "phase_", "noise_", "own_cores", "other_cores",
    "cores", "started", "resumed", "folder", "out", "load", "noisy", "user_", "total_", "device_hours_", "joules_",
    "requests_per_", "concurrency", "waiting", "ttft.", "engine_ttft.", "queue.", "tpot.", "chunk_gap.", "token_gap.",
    "e2e.", "mbu", "mfu", "of_least.", "useful_mfu", "arrived", "admitted", "prefilled", "finished",
    "emitted_at", "ingestion",
)  # fmt: skip
"""How the names begin of what no two runs have alike."""


pytestmark = pytest.mark.usefixtures("no_pictures")


def timeless(value: Any) -> Any:
    """A result without what no two runs have alike."""
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if not key.startswith(TIMES)}
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
        (["engine.max_batch_size=2", "sampling.n=2", "sampling.temperature=1", "dataset.count=2"], 3),
        pytest.param(["conversations"], 4, marks=pytest.mark.full),  # in the middle of one
    ],
)
def test_the_result_is_the_uninterrupted_one(more, at, configure, tiny, tmp_path: Path, capsys, monkeypatch) -> None:
    """Bit for bit, at every temperature; and what cannot be resumed is said. A complete run is left alone."""
    given = [*tiny, *NGRAM, *more]
    if more == ["conversations"]:
        own = [text for text in tiny if not text.startswith("dataset.")]
        given = [*own, *NGRAM, *chats(tmp_path / "p.jsonl", 1, 2, 1, 2)]
    run(configure("run", *given, f"out={tmp_path / 'whole'}"))
    stop = Stop(monkeypatch, KeyboardInterrupt(), {at})
    with pytest.raises(KeyboardInterrupt):
        run(configure("run", *given))
    records = tmp_path / "out" / "records.jsonl"
    before, written = read_records(records), records.read_bytes()
    for words, message in (  # it goes on with resume=true only, and with the settings and prompts that it had
        ([], "go on with resume=true"),
        (["resume=true", "drafter.branches=1"], r"had drafter\.branches=2, and this one has drafter\.branches=1"),
        (["resume=true", "+sampling.extra=1"], r"had sampling\.extra=nothing, and this one has sampling\.extra=1"),
        (["resume=true", f"out={tmp_path / 'none'}"], r"resume=true: there is no run in "),
    ):
        with pytest.raises(ValueError, match=message):
            run(configure("run", *given, *words))
    assert records.read_bytes() == written
    with records.open("a") as file:
        file.write('{"prompt": "half a li')  # as a crash would leave it
    done = stop.calls
    made = run(configure("run", *given, "resume=true"))
    assert made.complete
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    # What was finished did not run again: only the warm-up and the rest.
    whole = len(read_records(tmp_path / "whole" / "records.jsonl")) // 2
    assert stop.calls - done < whole + 1
    assert read_records(records)[0].seconds == before[0].seconds
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["config"]["resume"] is False and len(manifest["resumed"]) == 1
    # It is complete: nothing is loaded, and nothing is written.
    files = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    load = "specdec.target.target.Target.from_pretrained"
    monkeypatch.setattr(load, lambda *_, **__: pytest.fail("a model is loaded for nothing"))
    capsys.readouterr()
    assert run(configure("run", *given, "resume=true")).rows == made.rows
    assert "complete already" in capsys.readouterr().out
    assert files == {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_what_was_left_to_the_machine_is_recorded_and_kept(configure: Configure, tmp_path: Path, monkeypatch) -> None:
    """The format of a drafting model is chosen once, wherever in the drafter it is; one that is given stays."""
    asked = Mock(return_value=("int8", "int8: as measured"))
    monkeypatch.setattr("experiments.session.methods.format_here", asked)
    drafters, given = {"choice": "drafter"}, ["drafter=choice", "method=choice", f"out={tmp_path / 'out'}"]
    assert check_components(configure("run", "drafter=quantized"), drafters) == {} and not asked.called
    config = configure("run", *given)
    assert check_components(config, drafters) == {"drafter.model": "bundled/drafter drafts in int8: as measured"}
    write_manifest(tmp_path / "out", plain_whole(config))
    again = configure("run", *given, "resume=true")
    begun(again)
    assert check_components(again, drafters) == {} and again.drafter.model.quantization == "int8"
    asked.assert_called_once()
    several = configure("run", "drafter=model", "+methods.a=${drafter}", *given[2:])
    assert check_components(several, {"a": "methods.a"}) and several.methods.a.quantization == "int8"
    assert several.methods.a.name == "bundled/drafter", "a section that refers to another one stays whole"
    other = configure("run", *given, "drafter.model.quantization=int4", "resume=true")
    with pytest.raises(ValueError, match=r"had drafter\.model\.quantization=int8, and this one has .*=int4"):
        begun(other)


def test_other_prompts_or_weights_are_not_gone_on_with(configure, tiny, tmp_path: Path, monkeypatch) -> None:
    """The manifest has digests of the models, and the commit of the user's own code."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "own.py").write_text("")
    monkeypatch.chdir(mine)
    for words in ("init -q", "add own.py", "-c user.name=a -c user.email=a@b commit -qm parts"):
        subprocess.run(["git", *words.split()], cwd=mine, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=mine, capture_output=True, text=True).stdout.strip()
    tiny_model(vocab_size=257).save_pretrained(mine / "drafter")
    given = [text for text in tiny if not text.startswith("dataset.")] + chats(tmp_path / "p.jsonl", 1)
    given += ["drafter=model", "method=model", f"drafter.name={mine / 'drafter'}"]
    run(configure("run", *given))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    project = manifest["project"]
    assert (project["commit"], project["folder"]) == (commit, str(mine.resolve()))
    assert project["dirty"] and "?? drafter/" in project["changes"]
    assert manifest["revisions"]["target"].startswith("files:")
    assert manifest["revisions"]["drafter"] not in (None, manifest["revisions"]["target"])
    (tmp_path / "out" / "summary.json").unlink()
    tiny_model(vocab_size=257, seed=1).save_pretrained(mine / "drafter")
    with pytest.raises(ValueError, match="had other files of its models"):
        run(configure("run", *given, "resume=true"))
    tiny_model(vocab_size=257).save_pretrained(mine / "drafter")
    chats(tmp_path / "p.jsonl", 2)
    with pytest.raises(ValueError, match="had other prompts"):
        run(configure("run", *given, "resume=true"))


@pytest.mark.full
def test_a_sweep_goes_on_after_its_finished_jobs_and_prompts(tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    given = ["-m", *(text for text in tiny if not text.startswith("out=")), *NGRAM, "drafter.branches=1,2"]
    ends = {name: f"out={tmp_path / name}" for name in ("whole", "part", "none")}
    assert launched(*given, ends["whole"], monkeypatch=monkeypatch) == 0
    stop = Stop(monkeypatch, KeyboardInterrupt(), {7})  # a warm-up and three prompts each: in the second job
    assert launched(*given, ends["part"], monkeypatch=monkeypatch) == 130
    capsys.readouterr()
    assert launched(*given, "resume=true", ends["part"], monkeypatch=monkeypatch) == 0
    assert stop.calls == 7 + 3, "the second job's warm-up and two prompts"
    for job in "01":
        assert results(tmp_path / "part" / job) == results(tmp_path / "whole" / job)
    # It ends with the comparison, as the first did.
    whole, part = (json.loads((tmp_path / name / "comparison.json").read_text()) for name in ("whole", "part"))
    assert timeless(whole) == timeless(part)
    assert launched(*given, "resume=true", ends["none"], monkeypatch=monkeypatch) == 1
    assert "give the interrupted one's folder as out=FOLDER" in capsys.readouterr().err
