"""Methods with a target and an engine of their own in one run, and the ladder that is made of them."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.config.launch import launch
from experiments.results.records import read_records
from experiments.run import run
from tests.experiments.runs import Configure, summary_file

# Plain decoding runs the model's own code; the others have captures, and some a cache in int8: another law.
LADDER = [
    "drafter=none",
    "method=none",
    "+drafter@methods.optimized=none",
    "+drafter@methods.cached=none",
    "+drafter@methods.copied=ngram",
    "+setups={plain: {engine: {optimize: false, max_batch_size: 1}}, optimized: {engine: {max_batch_size: 1}}, "
    "cached: {engine: {max_batch_size: 1, kv_cache: int8}}, copied: {engine: {kv_cache: int8}}}",
    "ladder=[plain,optimized,cached,copied]",
    "engine.max_batch_size=2",
]


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


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["+setups.copid.engine.optimize=false"], "setups.copid: there is no method 'copid': did you mean copied?"),
        (
            ["+setups.copied.engin.optimize=false"],
            "there is no setups.copied.engin: did you mean setups.copied.engine?",
        ),
        (["+setups.copied.target.quantisation=int8"], "there is no setups.copied.target.quantisation: did you mean"),
        (
            ["+setups.copied.engine.max_length=64"],
            "setups.copied.engine.max_length: all methods decode the same tokens",
        ),
        (["+setups.copied.engine=fast"], "setups.copied.engine='fast': give settings"),
        (["+setups.copied.engine.optimize=false", "+contender=hf_generate"], "contenders and setups are both given"),
        (["ladder=[plain,nothing]"], "ladder: nothing has neither a drafter nor a setup"),
        (["ladder=[plain]"], "ladder=['plain']: give at least two methods, each once"),
    ],
)
def test_a_wrong_setup_is_one_sentence(
    more: list[str], sentence: str, configure: Configure, tiny: list[str], tmp_path: Path
) -> None:
    words = ["drafter=none", "method=none", "+drafter@methods.copied=ngram", "+drafter@methods.nothing=none"]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        run(configure("run", *tiny, *words, *more))
    assert not (tmp_path / "out").exists(), "before any work"


def test_the_studies_name_what_they_have(configure: Configure) -> None:
    config = configure("run", "experiment=ingredients")
    assert set(config.setups) == {"plain", *config.methods}
    assert set(config.ladder) == {"plain", *config.labels}
    config = configure("run", "experiment=quadrants")
    assert list(config.labels) == list(config.methods)


@pytest.mark.full
@pytest.mark.usefixtures("no_pictures")
def test_the_ladder_of_ingredients_is_one_command(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path
) -> None:
    names = ["speculation", "all", "only_speculation", "without_optimized", "without_int4"]
    models = [f"methods.{name}.name={saved / 'drafter'}" for name in names]
    sizes = ["method=none", "target.inflate=null", "engine.max_length=128", "engine.max_batch_size=2"]
    run(configure("run", "experiment=ingredients", *tiny, *models, *sizes))
    (ladder,) = json.loads((tmp_path / "out" / "ingredients.json").read_text())["ladders"]
    changed = [rung["changed"] for rung in ladder["rungs"]]
    assert changed == [[], ["forwards"], ["weights"], ["weights"], ["drafter"], ["batch"]]
    assert [rung["same_law"] for rung in ladder["rungs"]] == [True, True, False, False, False, False]
    effects = {(each["lever"], each["value"]): each for each in ladder["effects"]}
    assert all(each["alone"] is not None for each in effects.values())
    assert [each["value"] for each in effects.values() if each["last"] is None] == ["int8"]


@pytest.mark.full
@pytest.mark.usefixtures("no_pictures")
def test_the_four_kinds_of_requests_are_one_command(
    saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [text for text in tiny if not text.startswith(("out=", "dataset.prompt_tokens"))]
    given += ["experiment=quadrants", "target.inflate=null", "engine.max_length=128", "engine.max_batch_size=2"]
    given += [f"methods.model.name={saved / 'drafter'}", f"methods.eagle.name={saved / 'eagle'}"]
    given += ["dataset.tokens=8,32", "dataset.longest=32", "sampling.max_new_tokens=4,12", "dataset.count=4"]
    given = [text for text in given if text != "sampling.max_new_tokens=12"]
    monkeypatch.setattr(sys, "argv", ["run.py", *given, f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    launch(run, "run")
    found = json.loads((tmp_path / "sweep" / "quadrants.json").read_text())["quadrants"]
    assert [(each["quadrant"], each["input_tokens"], each["max_new_tokens"]) for each in found] == [
        ("SS", 8, 4), ("SL", 8, 12), ("LS", 32, 4), ("LL", 32, 12)
    ]  # fmt: skip
    assert all(len(each["methods"]) == 5 for each in found)
    assert "Four kinds of requests" in capsys.readouterr().out
