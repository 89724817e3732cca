"""Runs that are stopped, that fail, or whose method is broken: results stay, and the run says what happened."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafters.ngram import NGramDrafter
from experiments.results import lossless
from experiments.results.records import read_records
from experiments.run import run
from experiments.session.measurement import NotLosslessError
from specdec import Batch, DraftTree
from tests.experiments.runs import Configure, Stop, invoke, local, summary_file
from verifiers.rejection import RejectionVerifier

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_ctrl_c_keeps_finished_prompts_and_exits_with_130(
    saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    Stop(monkeypatch, KeyboardInterrupt(), {3})
    code = invoke(*tiny, *local(saved, "ngram"), monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert code == 130
    assert len(read_records(tmp_path / "out" / "records.jsonl")) == 2
    assert "INCOMPLETE" in capsys.readouterr().out


def test_a_crash_keeps_finished_prompts(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the engine, where it would be a failed prompt. A tracker that cannot be imported changes nothing."""
    calls = []

    def full_disk(*arguments: object, **more: object) -> dict[str, Any]:
        calls.append(arguments)
        if len(calls) > 2:
            raise OSError("no space left")
        return {}

    monkeypatch.setattr("experiments.measuring.measure.find_divergence", full_disk)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(OSError, match="no space left"):
        run(configure("run", *tiny, *local(saved, "ngram"), "tracker=wandb"))
    summary = summary_file(tmp_path / "out")
    assert not summary["complete"]
    assert summary["methods"][1]["finished"] == 2


class WrongRoot(NGramDrafter):
    """Puts another token where the sequence's last one belongs: the output is another sequence's."""

    def propose(self, batch: Batch) -> DraftTree:
        tree = super().propose(batch)
        tokens = tree.tokens.clone()
        tokens[:, 0] = (tokens[:, 0] + 1) % batch.vocab_size
        return replace(tree, tokens=tokens)


def test_a_broken_drafter_ends_the_run_with_an_error_and_keeps_its_results(
    configure: Configure, tiny: list[str], tmp_path: Path, capsys: Any
) -> None:
    broken = ["drafter=ngram", "method=broken", f"drafter._target_={WrongRoot.__module__}.WrongRoot"]
    config = configure("run", *tiny, *broken, "target.dtype=float32")
    with pytest.raises(NotLosslessError, match=r"^broken: NOT LOSSLESS: . of 3 outputs leave plain decoding's"):
        run(config)
    folder = tmp_path / "out"
    json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)
    found = summary_file(folder)
    row = found["methods"][1]
    assert found["complete"] and row["lossless"] == "not lossless" and row["largest_margin"] > row["tie_bound"] > 0
    worst = lossless.worst(read_records(folder / "records.jsonl"))
    assert worst is not None and worst.tokens[0] != worst.tokens[1]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["lossless"]["broken"] == "not lossless" and manifest["planned"] == 3
    shown = capsys.readouterr().out
    assert "NOT LOSSLESS" in shown[: shown.index("wrote")], "in the table"
    assert "broken: NOT LOSSLESS" in shown[shown.index("wrote") :], "and at the end"
    config.resume = True
    with pytest.raises(NotLosslessError):
        run(config)  # it is complete, and as broken as before


class OwnRule(RejectionVerifier):
    """A rule that does not ship with the package."""


def test_a_failing_prompt_is_counted_and_the_run_goes_on(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """With a rule of the user's own, which is exact by its own account until it is checked."""
    Stop(monkeypatch, RuntimeError("boom"), {3})
    run(configure("run", *tiny, *local(saved, "ngram"), f"verifier._target_={OwnRule.__module__}.OwnRule"))
    plain, method = summary_file(tmp_path / "out")["methods"]
    assert (method["finished"], method["failed"]) == (2, 1)
    (error,) = (record.error for record in read_records(tmp_path / "out" / "records.jsonl") if record.failed)
    assert re.fullmatch(r"RuntimeError: boom \(at \S+runs.py:\d+ in \S+\)", error or "")
    assert (plain["finished"], plain["failed"]) == (3, 0)
    assert method["exactness"] == "exact (declared)"
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["exactness"]["ngram"] == "exact (declared)"
    shown = capsys.readouterr().out
    assert "ngram failed on 1 of 3 prompts: RuntimeError: boom" in shown
    assert "acceptance rule: exact (declared)" in shown


@pytest.mark.parametrize(("policy", "finished"), [("skip", 2), pytest.param("cut", 3, marks=pytest.mark.full)])
def test_prompts_that_do_not_fit_are_said_once(
    policy: str, finished: int, configure: Configure, saved: Path, tiny: list[str], tmp_path: Path,
    capsys: Any,
) -> None:  # fmt: skip
    lines = [{"prompt": "x" * size} for size in (10, 100, 20)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = ["dataset=jsonl", f"dataset.file={tmp_path / 'p.jsonl'}", "engine.max_length=64"]
    tiny.remove("dataset.prompt_tokens=16")
    summary = run(configure("run", *tiny, *local(saved, "ngram"), *more, f"dataset.too_long={policy}"))
    assert summary.complete
    for method in summary_file(tmp_path / "out")["methods"]:
        assert (method["finished"], method["failed"]) == (finished, 0)
    told = capsys.readouterr()
    beginning = "1 of 3 prompts do not fit into engine.max_length=64 with sampling.max_new_tokens=12"
    assert told.err.count(beginning) == 1
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["prompts"] == finished
    counted = {"skip": "skipped", "cut": "cut"}[policy]
    nothing = {"cut": 0, "skipped": 0, "of": 3, "longest": 112, "room": 64}
    assert manifest["too_long"] == nothing | {counted: 1}
