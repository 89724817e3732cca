"""Whole runs on tiny models: what they leave behind; several methods and engines; runs that stop, fail or are wrong."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from drafters.ngram import NGramDrafter
from experiments.results import lossless
from experiments.results.records import read_records
from experiments.results.rows import family
from experiments.results.runs import load_run
from experiments.results.timing import STAGES
from experiments.run import run
from experiments.session.assembly import left_out
from experiments.session.measurement import NotLosslessError
from specdec import Batch, DraftTree, SamplingParams, Target
from specdec.native import native_library
from tests.experiments.runs import Configure, Stop, local, summary_file
from tests.models import tiny_model

pytestmark = pytest.mark.usefixtures("no_pictures")
Run = Callable[..., Path]


@pytest.fixture
def ran(configure: Configure, saved: Path, tiny: list[str], tmp_path: Path) -> Run:
    def folder(drafter: str, *words: str) -> Path:
        run(configure("run", *tiny, *local(saved, drafter), *words))
        return tmp_path / "out"

    return folder


def test_a_run_leaves_everything_behind(ran: Run, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Limits and a price add figures and a table. Memory is planned before, and held against the truth."""
    monkeypatch.undo()  # pictures are saved
    folder = ran("model", "sla.ttft=60", "sla.e2e=1us", "price=3.6", "engine.max_batch_size=2")
    pictures = {f"{name}.{kind}" for name in ("acceptance_by_position", "time") for kind in ("png", "svg")}
    texts = {"records.jsonl", "summary.json", "manifest.json", "prompts.jsonl", "tokens.json", "tables.txt"}
    assert {path.name for path in folder.iterdir()} == texts | pictures

    summary = summary_file(folder)
    assert summary["complete"] and summary["rows"][0]["planned"] == 3
    plain, method = summary["methods"]
    assert (plain["method"], method["method"], method["exactness"]) == ("plain", "model", "exact")
    assert (method["finished"], method["failed"], method["equal_to_plain"]) == (3, 0, 3)
    assert method["mean_acceptance_length"] >= plain["mean_acceptance_length"] == 1 and method["speedup"] > 0
    assert set(family(method, "stage_seconds")) == {*STAGES, "other"}
    for row in (plain, method):
        assert row["attainment"] == 0, "nothing ends within a millionth of a second"
        assert row["limits"] == "TTFT ≤ 60 s, e2e ≤ 0.001 ms"
        assert row["ttft.p50"] > 0 and row["tpot.count"] == 3

    records = read_records(folder / "records.jsonl")
    assert len(records) == 6
    for record in records:
        assert record.seconds is not None and record.ingestion is not None and record.ingestion > 0
        moments = [0.0, record.arrived, record.admitted, record.prefilled, *record.emitted_at, record.finished]
        assert moments == sorted(moments, key=lambda moment: moment or 0.0) and moments[-1] <= record.seconds
        assert (sum(record.emitted), len(record.emitted)) == (len(record.token_ids), len(record.accepted))

    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["config"]["dataset"]["count"] == 3
    assert manifest["seeds"] == {"sampling": 0, "dataset": 0, "bootstrap": 0}
    assert (manifest["dtype"], manifest["command"]) == ("float32", sys.argv) and manifest["versions"]["torch"]
    assert {"device", "machine", "git"} <= set(manifest) and manifest["loading_seconds"] > 0
    held = manifest["memory"]["held"]
    assert all(held[part] > 0 for part in ("weights", "drafter", "kv", "drafter_kv", "scratch"))
    recordings = manifest["recordings"]["model"]
    assert recordings == manifest["recordings"]["plain"], "they share an engine"
    assert (recordings["recorded"], recordings["refused"]) == ("rounds" if native_library() else "decisions", {})
    assert recordings["stages"] > 0 and 0 < recordings["replayed"] <= recordings["rounds"]
    shown = capsys.readouterr().out
    wanted = ("mean acceptance length", "records.jsonl", "goodput,", "price of", "Memory held")
    assert not [text for text in wanted if text not in shown]


@pytest.mark.full
def test_several_policies_in_one_run(ran: Run) -> None:
    """Each is a method, and costs and calibrations are kept by method."""
    policies = ["fixed", "cost_aware", "confidence", "cost_aware_nodes"]
    chosen = [f"+policy@policies.{name}={name}" for name in policies]
    folder = ran("model", *chosen, "drafter.shape=2")
    assert [each["method"] for each in summary_file(folder)["methods"]] == ["plain", *policies]
    kept = {path.name for path in folder.iterdir()}
    costs = {f"{name}_round_costs.json" for name in ("cost_aware", "cost_aware_nodes")}
    assert kept >= costs | {f"{name}_calibration.json" for name in ("confidence", "cost_aware_nodes")}
    found = json.loads((folder / "confidence_calibration.json").read_text())
    assert found["source"] == "top" and all(0 <= each["calibration_error"] <= 1 for each in found["errors"])


def test_the_demo(configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.undo()  # pictures are saved
    words = ["target.inflate=null", "target.dtype=float32", *tiny, "engine.max_length=128", "dataset.count=1"]
    words += [f"methods.model.name={saved / 'drafter'}", "sampling.max_new_tokens=6", "method=m"]
    words += ["~methods.medusa", "~methods.eagle"]  # heads for another target
    run(configure("run", "experiment=demo", *words))
    summary = summary_file(tmp_path / "out")
    found = [(m["temperature"], m["method"]) for m in summary["methods"]]
    assert summary["complete"] and found == [(t, name) for t in (0, 1) for name in ("plain", "ngram", "model")]
    assert all(m["equal_to_plain"] == 1 for m in summary["methods"] if m["temperature"] == 0 and m["method"] != "plain")
    shown = capsys.readouterr().out
    assert shown.count("mean acceptance") == 1, "one table"
    assert shown.index("drafted and accepted") < shown.index("mean acceptance"), "both outputs come first"
    assert "6 target forwards" in shown and re.search(r"[«±]", shown), "marks stand for colors in a pipe"
    assert (tmp_path / "out" / "speedup.png").exists() and "speedup.png" in shown


def test_methods_are_measured_together(configure: Configure, saved: Path, tiny: list[str], tmp_path, capsys) -> None:
    words = ["drafter=none", "method=none", "+drafter@methods.copied=ngram", "+drafter@methods.drawn=model"]
    words += ["+verifier@rules.drawn=block", "+labels={copied: prompt lookup, drawn: 'model: chain'}"]
    words += [f"methods.drawn.name={saved / 'drafter'}", "methods.drawn.shape=2", "temperatures=[0,1]"]
    words.append("study={_target_:experiments.session.temperatures.temperatures,_partial_:true}")
    run(configure("run", *tiny, *words, "compared_with=copied", "dataset.count=2", "sampling.max_new_tokens=4"))
    summary = summary_file(tmp_path / "out")
    assert summary["complete"]
    assert summary["methods"][2]["gain_over"] == "copied"
    assert load_run(tmp_path / "out").rows[5]["gain"] is not None, "read back, it is compared again"
    shown = capsys.readouterr().out
    assert "What drafting brings by temperature" in shown, "the study"
    assert "prompt lookup" in shown and "model: chain" in shown and "difference" in shown


@pytest.mark.full
def test_methods_have_engines_of_their_own(configure: Configure, tiny: list[str], tmp_path: Path) -> None:
    """Plain decoding runs the model's own code; the others have captures, and some a cache in int8: another law."""
    words = ["drafter=none", "method=none", "+drafter@methods.optimized=none", "+drafter@methods.cached=none"]
    words += ["+drafter@methods.copied=ngram", "engine.max_batch_size=2"]
    words.append(
        "+setups={plain: {engine: {optimize: false, max_batch_size: 1}}, optimized: {engine: {max_batch_size: 1}}, "
        "cached: {engine: {max_batch_size: 1, kv_cache: int8}}, copied: {engine: {kv_cache: int8}}}"
    )
    run(configure("run", *tiny, *words))
    # Two prompts are a batch of all methods: those with one slot decode them in turn.
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert {record.batch for record in records} == {0, 1} and len(records) == 12
    for method, waits in (("plain", True), ("optimized", True), ("copied", False)):
        first, second = [record for record in records if record.method == method and record.batch == 0]
        assert ((second.admitted or 0.0) >= (first.finished or 0.0)) is waits, "for the only slot"
    # What is drafted on another law is compared with plain decoding of that law, and nothing else is.
    summary = summary_file(tmp_path / "out")
    found = {method["method"]: (method["exactness"], method["lossless"]) for method in summary["methods"]}
    assert found["copied"] == ("exact for another target", "equal") and found["cached"] == ("another target", None)
    assert found["plain"] == found["optimized"] == (None, None)
    cached = {r.prompt: r.token_ids for r in records if r.method == "cached"}
    assert all(record.token_ids == cached[record.prompt] for record in records if record.method == "copied")


def test_contenders_are_interleaved_with_ours(ran: Run, saved: Path) -> None:
    words = ["dataset.count=2", "warmup_prompts=0", "target.dtype=float32"]
    words += ["+contender=[hf_prompt_lookup,hf_assisted]", "sampling.max_new_tokens=6"]
    folder = ran("ngram", *words, f"contenders.hf_assisted.assistant={saved / 'drafter'}")
    records = read_records(folder / "records.jsonl")
    methods = ["plain", "ngram", "hf_prompt_lookup", "hf_assisted"]
    assert [record.method for record in records] == methods * 2
    assert len({record.token_ids for record in records if record.prompt == records[0].prompt}) == 1
    assert all(record.equals_plain for record in records if record.method != "plain")
    summary = summary_file(folder)
    lookup, assisted = summary["methods"][2:]
    assert lookup["speedup"] > 0 and lookup["mean_acceptance_length"] >= 1 and lookup["draft_acceptance_rate"] is None
    assert assisted["mean_acceptance_length"] > 1.3, "the drafter is of the target's opinion mostly"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["exactness"]["hf_assisted"], manifest["series"]) == ("exact (declared)", 4)
    best = max(summary["methods"], key=lambda row: row["speedup"] or 1.0)
    shown = " ".join((folder / "tables.txt").read_text().split())
    assert f"fastest of all: {best['method']}, " in shown


def test_a_crash_keeps_finished_prompts(ran: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the engine, where it would be a failed prompt."""
    full_disk = Mock(side_effect=[{}, {}, OSError("no space left")])
    monkeypatch.setattr("experiments.measuring.measure.find_divergence", full_disk)
    with pytest.raises(OSError, match="no space left"):
        ran("ngram")
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


def test_a_broken_drafter_ends_the_run_with_an_error_and_keeps_its_results(ran: Run, tmp_path: Path) -> None:
    broken = [f"drafter._target_={WrongRoot.__module__}.WrongRoot", "method=broken", "target.dtype=float32"]
    with pytest.raises(NotLosslessError, match=r"^broken: NOT LOSSLESS: . of 3 outputs leave plain decoding's"):
        ran("ngram", *broken)
    folder = tmp_path / "out"
    json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)
    found = summary_file(folder)
    row = found["methods"][1]
    assert found["complete"] and row["lossless"] == "not lossless" and row["largest_margin"] > row["tie_bound"] > 0
    worst = lossless.worst(read_records(folder / "records.jsonl"))
    assert worst is not None and worst.tokens[0] != worst.tokens[1]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["lossless"]["broken"] == "not lossless" and manifest["planned"] == 3
    with pytest.raises(NotLosslessError):
        ran("ngram", *broken, "resume=true")  # it is complete, and as broken as before


def test_prompts_that_fail_or_do_not_fit_are_counted(ran: Run, tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    tiny.remove("dataset.prompt_tokens=16")
    lines = [{"prompt": "x" * size} for size in (10, 100, 20, 30)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["dataset=jsonl", f"dataset.file={tmp_path / 'p.jsonl'}", "dataset.count=4", "dataset.too_long=skip"]
    Stop(monkeypatch, RuntimeError("boom"), {3})
    folder = ran("ngram", *words, "engine.max_length=64")
    assert [(m["finished"], m["failed"]) for m in summary_file(folder)["methods"]] == [(3, 0), (2, 1)]
    (error,) = (record.error for record in read_records(folder / "records.jsonl") if record.failed)
    assert re.fullmatch(r"RuntimeError: boom \(at \S+runs.py:\d+ in \S+\)", error or "")
    told = capsys.readouterr()
    assert "ngram failed on 1 of 3 prompts: RuntimeError: boom" in told.out
    beginning = "1 of 4 prompts do not fit into engine.max_length=64 with sampling.max_new_tokens=12"
    assert told.err.count(beginning) == 1
    too_long = json.loads((folder / "manifest.json").read_text())["too_long"]
    assert too_long == {"cut": 0, "skipped": 1, "of": 4, "longest": 112, "room": 64}


def test_what_a_models_files_ask_for_and_a_run_leaves_out_is_said() -> None:
    model = tiny_model(layers=2)
    target, model.generation_config.suppress_tokens = Target(model), []
    assert left_out(target, [SamplingParams(temperature=1.0)]) is None
    for name, value in {"repetition_penalty": 1.1, "suppress_tokens": [5], "do_sample": True, "top_p": 0.8}.items():
        setattr(model.generation_config, name, value)
    said = left_out(target, [SamplingParams()])
    assert said is not None and "repetition_penalty=1.1, suppress_tokens=[5]" in said and "top_p" not in said
    assert "top_p=0.8" in str(left_out(target, [SamplingParams(temperature=1.0)]))
