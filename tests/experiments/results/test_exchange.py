"""Acceptance in others' files: what is written is read back with its figures, and what is not alike is said."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from experiments.reporting.published import Pair, export, published_table, unlike
from experiments.reporting.run_tables import prompts_needed
from experiments.results.comparison import make_rows
from experiments.results.exchange import FORMATS, Published, curve, exported, published
from experiments.results.runs import load_run, records_of
from tests.experiments.made_runs import loaded, made
from tests.experiments.results.outputs import output

GOLDEN = """\
# dataset: coding | temperature: 1.0 | output_len: 4096
bundled-target:
  thinking_on:
    1: 1.86
    2: 2.55
  thinking_off:
    2: 2.76
"""


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_written_is_read_back(form: str, tmp_path: Path) -> None:
    """Three prompts with rounds of 2, 1, and 0 or 1 accepted tokens."""
    run = loaded(tmp_path / "a", "drafter=model", "sampling.temperature=1")
    (file,) = export([run], form, tmp_path / "out")
    (found,) = published(str(file))
    rounds, accepted = 9, 3 * 3 + 1
    assert found.length == pytest.approx(1 + accepted / rounds, abs=0.005 if form == "inferencex" else 1e-12)
    assert found.drafted == (None if form == "spec_bench" else 2)
    assert found.rounds == (None if form == "inferencex" else rounds)
    assert found.length == pytest.approx(next(r for r in make_rows([run])).method.mean_acceptance_length, abs=0.005)


def test_the_fields_are_those_of_the_engines(tmp_path: Path) -> None:
    run = loaded(tmp_path / "a", "drafter=model")
    first = {form: export([run], form, tmp_path / "out")[0].read_text() for form in FORMATS}
    told = json.loads(first["vllm"].splitlines()[0])["metrics"]["speculative_decoding"]
    assert told == {
        "mean_acceptance_length": 2.0, "draft_acceptance_rate": 3 / 6, "acceptance_histogram": [1, 1, 1],
        "num_spec_steps": 3, "num_accepted_draft_tokens": 3, "num_draft_tokens": 6, "num_spec_tokens": 2,
        "per_step_accepted": [2, 1, 0], "per_step_drafted": [2, 2, 2],
    }  # fmt: skip
    (choice,) = json.loads(first["spec_bench"].splitlines()[0])["choices"]
    assert (choice["accept_lengths"], choice["decoding_steps"]) == ([3, 2, 1], [3]), "the target's token counts"
    assert yaml.safe_load(first["inferencex"]) == {"target": {"model_T0": {2: 2.11}}}
    assert "drafter=model" in first["inferencex"].splitlines()[3]


def test_golden_curves_are_read_with_their_conditions(tmp_path: Path) -> None:
    (tmp_path / "golden.yaml").write_text(GOLDEN)
    found = published(str(tmp_path / "golden.yaml"))
    assert [(each.name, each.drafted, each.length) for each in found] == [
        ("bundled-target, thinking_on", 1, 1.86),
        ("bundled-target, thinking_on", 2, 2.55),
        ("bundled-target, thinking_off", 2, 2.76),
    ]
    assert {(each.temperature, each.category) for each in found} == {(1.0, "coding")}


def test_curves_of_several_runs_are_one_and_keep_their_temperatures(tmp_path: Path) -> None:
    runs = [loaded(tmp_path / name, f"sampling.temperature={t}") for name, t in (("a", "0"), ("b", "1"), ("c", "1"))]
    (file,) = export(runs, "inferencex", tmp_path / "out")
    assert yaml.safe_load(file.read_text()) == {
        "target": {"model_T0": {2: 2.11}, "model_T1": {2: 2.11}, "c_model_T1": {2: 2.11}}
    }
    assert [each.temperature for each in published(str(file))] == [0, 1, 1]
    plain = "plain", [output("p", "plain")]
    assert curve({"plain": plain}, {}) == ""
    bad = "target", [output("p", accepted=(0, 0), proposed_depth=(3, 3))]
    assert yaml.safe_load(curve({"bad": bad, "plain": plain}, {})) == {"target": {"fast_T0": {3: 1.0}}}


def test_runs_of_two_sweeps_are_told_apart(tmp_path: Path) -> None:
    runs = [loaded(tmp_path / sweep / "0", "drafter=model") for sweep in ("a", "b")]
    files = export(runs, "vllm", tmp_path / "out")
    assert [file.parent.name for file in files] == ["a_0", "b_0"] and all(file.exists() for file in files)
    (file,) = export(runs, "inferencex", tmp_path / "out")
    assert yaml.safe_load(file.read_text()) == {"target": {"model_T0": {2: 2.11}, "b_0_model_T0": {2: 2.11}}}


def test_rounds_without_a_draft_and_turns_are_counted_as_each_project_does() -> None:
    drafted = {"accepted": (2, 0, 1), "proposed_depth": (2, 0, 2), "proposed_nodes": (2, 0, 2), "tokens": 6}
    records = [replace(output("p", "ngram", **drafted), turn=turn, temperature=0.5) for turn in (1, 0)]
    (line,) = map(json.loads, exported("spec_bench", records, "t")["spec_bench_ngram_T0.5.jsonl"].splitlines())
    (choice,) = line["choices"]
    assert choice["accept_lengths"] == [3, 1, 2] * 2 and choice["decoding_steps"] == [3, 3]
    told = json.loads(exported("vllm", records, "t")["vllm_ngram_T0.5.jsonl"].splitlines()[0])
    told = told["metrics"]["speculative_decoding"]
    assert (told["num_spec_steps"], told["mean_acceptance_length"]) == (2, 1 + 3 / 2)
    assert yaml.safe_load(curve({"run": ("t", records)}, {})) == {"t": {"ngram_T0.5": {2: 2.5}}}


def test_what_is_not_alike_is_said(tmp_path: Path) -> None:
    run = loaded(tmp_path / "a", "drafter=model")
    (row,) = (row for row in make_rows([run]) if row.method.method == "model")
    records = [record for record in records_of(run.folder) if record.method == "model"]
    theirs = Published("file", "qwen3.8-27b, thinking_on", 2, 2.52, temperature=1.0, category="coding")
    assert unlike(Pair(theirs, row, records)) == [
        "model (ours: bundled/target)", "temperature 1, ours 0", "prompts: coding; ours: without a category",
        "they give no interval",
    ]  # fmt: skip
    same = Published("file", "target, mode", 2, 2.1, rounds=9, temperature=0.0, category="")
    assert unlike(Pair(same, row, records)) == []
    for name, said in (("org/target", []), ("target-chat, on", ["model, perhaps (ours: bundled/target)"])):
        assert unlike(Pair(replace(same, name=name), row, records)) == said
    some = [replace(record, proposed_depth=(2, 0, 2)) for record in records]
    left = "33% of our rounds have no draft, and theirs leave such rounds out"
    assert unlike(Pair(same, row, some)) == [left] and not unlike(Pair(replace(same, every_round=True), row, some))
    for length, said in ((0.9, "cannot count the target's own token: add 1"), (3.1, "2 drafted tokens give 3 at most")):
        assert said in unlike(Pair(replace(same, length=length), row, records))[0]
    unsaid = replace(same, name="unsaid", drafted=None)
    table = published_table([row], [records], [theirs, replace(same, name="other", drafted=7), unsaid])
    text = table.markdown()
    assert "2.52" in text and text.count("2.11 [2.00, 2.33]") == 2
    assert "no run of ours drafted 7 tokens per round" in text and "their number of drafted tokens is not said" in text


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.yaml", None, "there is no such file"),
        ("bad.yaml", "a: [", "is no YAML"),
        ("other.yaml", "a: {b: 3}", "no acceptance in a form that is known"),
        ("lines.jsonl", '{"a": 1}\n', "no acceptance in a form that is known"),
        ("broken.jsonl", '{"choices": []}\n{', "line 2 is no JSON"),
        ("older.jsonl", '{"metrics": {"speculative_decoding": {"num_draft_tokens": 3}}}\n', "line 1 has another form"),
        ("words.jsonl", '{"choices": [{"accept_lengths": ["two"]}]}\n', "line 1 has another form"),
    ],
)
def test_files_of_another_form_are_refused(name: str, text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        published(str(tmp_path / name))


def test_the_prompts_that_an_interval_would_take_are_said(tmp_path: Path) -> None:
    """Half of the width needs four times as many."""
    folder = made(tmp_path / "a", "drafter=model")
    methods, narrow = load_run(folder).summary.methods, load_run(folder, width=0.05).summary.methods
    low, high = next(m.mean_acceptance_length_interval for m in methods if m.method == "model")
    wanted = 3 * ((high - low) / 2 / 0.1) ** 2
    assert f"±0.1 tokens per round would take about {math.ceil(wanted)} prompts" in prompts_needed(methods, 0.1)
    assert str(math.ceil(4 * wanted)) in prompts_needed(narrow, 0.05)
    assert prompts_needed([m for m in methods if m.method == "plain"], 0.1) == ""
