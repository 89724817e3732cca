"""Runs of several methods: each with a rule, a target and an engine of its own if it likes."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.results.records import read_records
from experiments.results.runs import load_run
from experiments.run import run
from tests.experiments.runs import Configure, launched, summary_file


def test_methods_are_measured_together(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, no_pictures: None, capsys: Any
) -> None:
    words = ["drafter=none", "method=none", "+drafter@methods.copied=ngram", "+drafter@methods.drawn=model"]
    words += ["+verifier@rules.drawn=block", "+labels={copied: prompt lookup, drawn: 'model: chain'}"]
    words += [f"methods.drawn.name={saved / 'drafter'}", "methods.drawn.shape=2", "temperatures=[0,1]"]
    words.append("study={_target_:experiments.session.temperatures.temperatures,_partial_:true}")
    run(configure("run", *tiny, *words, "compared_with=copied", "dataset.count=2", "sampling.max_new_tokens=4"))
    summary = summary_file(tmp_path / "out")
    found = [(method["temperature"], method["method"]) for method in summary["methods"]]
    assert found == [(t, name) for t in (0, 1) for name in ("plain", "copied", "drawn")]
    assert summary["complete"]
    assert summary["methods"][2]["gain"]["over"] == "copied"
    assert load_run(tmp_path / "out").summary.methods[5].gain is not None, "read back, it is compared again"
    shown = capsys.readouterr().out
    assert "What drafting brings by temperature" in shown, "the study"
    assert "prompt lookup" in shown and "model: chain" in shown and "difference" in shown


# Plain decoding runs the model's own code; the others have captures, and some a cache in int8: another law.
LADDER = [
    *("drafter=none", "method=none", "+drafter@methods.copied=ngram"),
    *("+drafter@methods.optimized=none", "+drafter@methods.cached=none"),
    "+setups={plain: {engine: {optimize: false, max_batch_size: 1}}, optimized: {engine: {max_batch_size: 1}}, "
    "cached: {engine: {max_batch_size: 1, kv_cache: int8}}, copied: {engine: {kv_cache: int8}}}",
    "ladder=[plain,optimized,cached,copied]",
    "engine.max_batch_size=2",
]


@pytest.mark.full
@pytest.mark.usefixtures("no_pictures")
def test_methods_have_engines_of_their_own(configure: Configure, tiny: list[str], tmp_path: Path, capsys: Any) -> None:
    run(configure("run", *tiny, *LADDER))
    out = tmp_path / "out"
    manifest = json.loads((out / "manifest.json").read_text())
    found = manifest["ingredients"]
    assert list(found) == ["plain", "optimized", "cached", "copied"]
    assert [each["batch"] for each in found.values()] == ["1", "1", "1", "2"]
    assert [each["KV cache"] for each in found.values()] == ["float32", "float32", "int8", "int8"]
    assert found["plain"]["forwards"] == "the model's own code" != found["optimized"]["forwards"]
    assert found["copied"]["drafter"] == "NGram, up to 16 tokens"
    # Two prompts are a batch of all methods: those with one slot decode them in turn.
    records = read_records(out / "records.jsonl")
    assert {record.batch for record in records} == {0, 1} and len(records) == 12
    for method, waits in (("plain", True), ("optimized", True), ("copied", False)):
        first, second = [record for record in records if record.method == method and record.batch == 0]
        assert ((second.admitted or 0.0) >= (first.finished or 0.0)) is waits, "for the only slot"
    # What is drafted on another law is compared with plain decoding of that law, and nothing else is.
    verdicts = {method["method"]: method["lossless"] for method in summary_file(out)["methods"]}
    assert [name for name, verdict in verdicts.items() if verdict is not None] == ["copied"]
    assert verdicts["copied"]["verdict"] == "equal"
    stated = {method["method"]: method["exactness"] for method in summary_file(out)["methods"]}
    assert stated == {
        "plain": None, "optimized": None, "cached": "another target", "copied": "exact for another target"
    }  # fmt: skip
    cached = {r.prompt: r.token_ids for r in records if r.method == "cached"}
    assert all(record.token_ids == cached[record.prompt] for record in records if record.method == "copied")
    shown = " ".join(capsys.readouterr().out.split())
    assert "Where the speedup comes from" in shown and "CHANGES SEVERAL INGREDIENTS AT ONCE: copied" in shown
    assert (out / "ingredients.md").exists() and (out / "ingredients.json").exists()


@pytest.mark.full
@pytest.mark.usefixtures("no_pictures")
def test_the_four_kinds_of_requests_are_one_command(
    saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [text for text in tiny if not text.startswith(("out=", "dataset.prompt_tokens", "sampling"))]
    given += ["experiment=quadrants", "target.inflate=null", "engine.max_length=128", "engine.max_batch_size=2"]
    given += [f"methods.model.name={saved / 'drafter'}", f"methods.eagle.name={saved / 'eagle'}"]
    given += ["dataset.tokens=8,32", "dataset.longest=32", "sampling.max_new_tokens=4,12", "dataset.count=4"]
    assert launched(*given, f"hydra.sweep.dir={tmp_path / 'sweep'}", monkeypatch=monkeypatch) == 0
    found = json.loads((tmp_path / "sweep" / "quadrants.json").read_text())["quadrants"]
    assert [(each["quadrant"], each["input_tokens"], each["max_new_tokens"]) for each in found] == [
        ("SS", 8, 4), ("SL", 8, 12), ("LS", 32, 4), ("LL", 32, 12)
    ]  # fmt: skip
    assert all(len(each["methods"]) == 5 for each in found)
    assert "Four kinds of requests" in capsys.readouterr().out
