"""Runs side by side: what may be compared, how rows are named; thinking on and off."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

from experiments import results
from experiments.commands import settings
from experiments.datasets.prompt import Prompt
from experiments.measuring.jobs import render, template_facts
from experiments.reporting.comparison import report_comparison
from experiments.results.records import begin_records, read_records
from experiments.results.runs import find_folders, load_run
from experiments.run import run
from tests.experiments.conftest import byte_tokenizer
from tests.experiments.made_runs import loaded, made
from tests.experiments.runs import launched


def test_the_table_in_every_format_and_the_pictures(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for name, temperature in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
        shape = "[2,1]" if name in "ab" else "4"
        made(tmp_path / name, "drafter=model", f"drafter.shape={shape}", f"sampling.temperature={temperature}")
        if name in "cd":  # the method takes twice the time
            records = read_records(tmp_path / name / "records.jsonl")
            slow = [r if r.method == "plain" else dataclasses.replace(r, seconds=2 * r.seconds) for r in records]
            begin_records(tmp_path / name / "records.jsonl", slow)
    out = tmp_path / "out"
    words = [f"runs=[{','.join(str(tmp_path / name) for name in 'abcd')}]", "format=[md,csv,latex,parquet]"]
    words += [f"out={out}", f"hydra.run.dir={tmp_path / 'hydra'}"]
    assert launched(*words, monkeypatch=monkeypatch, main=settings.compare.main) == 0
    assert {path.name for path in out.iterdir()} == {
        *(f"comparison.{ending}" for ending in ("md", "csv", "tex", "parquet", "json", "png", "svg")),
        "acceptance.png", "acceptance.svg", "differences.md", "differences.csv", "two_way.md",
    }  # fmt: skip
    found = json.loads((out / "comparison.json").read_text())
    assert [(row["temperature"], row["name"]) for row in found["rows"]] == [
        (temperature, f"model, drafter.shape={shape}") for temperature in (0, 1) for shape in ("[2,1]", "4")
    ]
    # 18 tokens in 3.3 s against 6 s.
    assert found["rows"][0]["speedup"] == pytest.approx(6 / 3.3)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("1.82x", "acceptance rule: exact", "to plain")), "no column is cut off"
    text = (out / "comparison.md").read_text()
    assert "| 0 | model, drafter.shape=[2,1] | 2.11 [2.00, 2.33] | 1.82x [1.67, 2.00] |" in text
    assert "at commit 0123456789 with `drafter=model`" in text
    tex = (out / "comparison.tex").read_text()
    assert r"\bfseries 1.82x [1.67, 2.00]" in tex
    assert "bold: the largest figure of the exact methods at a temperature" in tex

    table = pandas.read_parquet(out / "comparison.parquet")
    loaded_again = results.load(*(tmp_path / name for name in "acbd")).runs
    of_methods = loaded_again.query("method != 'plain'").reset_index(drop=True)
    # Families of columns that only plain decoding's rows have are not in the comparison, and no other column is amiss.
    pandas.testing.assert_frame_equal(table.drop(columns="name"), of_methods[table.columns.drop("name")])
    assert list(pandas.read_csv(out / "comparison.csv").speedup) == list(table.speedup), "CSV has every digit"


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"target": {"name": "other"}}, r"differ in their target: bundled/target \(a\), other \(b\)"),
        ({"prompts_hash": "x"}, r"differ in their dataset: stdlib, 3 prompts, seed 0 \(a\), stdlib"),
        ({"dtype": "bfloat16"}, r"differ in their dtype: float32 \(a\), bfloat16 \(b\)"),
        ({"template": {"enable_thinking": True, "hash": "x"}}, "differ in their chat template: .*enable_thinking=True"),
    ],
)
def test_unlike_runs_are_refused_unless_told_to_and_then_it_is_said(
    facts: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [loaded(tmp_path / "a"), loaded(tmp_path / "b", planned=4, device="another", **facts)]
    with pytest.raises(ValueError, match=message + r".*: allow_mixed=true compares them"):
        report_comparison(runs, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report_comparison(runs, tmp_path / "out", allow_mixed=True, formats=["latex"])
    tex = (tmp_path / "out" / "comparison.tex").read_text()
    assert r"\bfseries" not in tex and "MIXED: the runs differ in their" in tex
    shown = " ".join(capsys.readouterr().out.split())
    assert f"INCOMPLETE: {tmp_path / 'b'} has not finished its 4 prompts" in shown
    assert "different devices (a processor, another)" in shown


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "is not the folder of a run: it has no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text('{"config": {}}'), "made by another version"),
        (lambda folder: (folder / "records.jsonl").write_text('{"prompt": "x"}\n'), "line 1 is not a record"),
    ],
)
def test_bad_folders_are_refused(spoil: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    spoil(made(tmp_path / "a"))
    with pytest.raises(ValueError, match=message):
        load_run(tmp_path / "a")


def test_a_folder_of_jobs_a_pattern_and_a_list_are_the_same_runs(tmp_path: Path) -> None:
    for number in (10, 9, 0):
        made(tmp_path / "sweep" / str(number))
    jobs = [tmp_path / "sweep" / str(number) for number in (0, 9, 10)]
    assert find_folders([str(tmp_path / "sweep")]) == jobs
    assert find_folders([f"{tmp_path}/sweep/*"]) == jobs
    assert find_folders([*map(str, jobs), f"{tmp_path}/sweep/../sweep"]) == jobs, "each once"


TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif -%}"
)
"""A template like Qwen3's: without thinking, the answer begins with an empty thought."""


@pytest.mark.usefixtures("no_pictures")
def test_arguments_of_the_chat_template_come_to_the_prompts_and_are_recorded(
    saved: Path, configure: Callable[..., Any], tiny: list[str], tmp_path: Path
) -> None:
    shutil.copytree(saved / "target", tmp_path / "thinker")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "thinker")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"turns": ["2 + 2?"]}) + "\n")
    words = [text for text in tiny if not text.startswith(("target", "dataset"))]
    words += [f"target.name={tmp_path / 'thinker'}", "dataset=jsonl", f"dataset.file={tmp_path / 'rows.jsonl'}"]
    words += ["chat_template={enable_thinking: false}", "drafter=none", "method=none", "warmup_prompts=0"]
    run(configure("run", *words))
    assert load_run(tmp_path / "out").manifest["template"]["enable_thinking"] is False
    (record,) = read_records(tmp_path / "out" / "records.jsonl")
    said = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert record.prompt_tokens == len(said), "one token per letter"


def test_only_conversations_have_a_template() -> None:
    tokenizer, options = byte_tokenizer(), {"enable_thinking": False}
    said, text = Prompt(id="a", turns=("Hi",), chat=True), Prompt(id="b", turns=("def f(",))
    assert template_facts([said], tokenizer, None) is None, "without a template"
    with pytest.raises(ValueError, match="the target's tokenizer has none, so arguments would change nothing"):
        template_facts([said], tokenizer, options)
    tokenizer.chat_template = TEMPLATE
    assert template_facts([text], tokenizer, {"anything": 1}) is None, "a pair's arguments do not hinder other prompts"
    facts = template_facts([said, text], tokenizer, options)
    assert facts is not None and facts["enable_thinking"] is False
    assert str(tokenizer.decode(list(render(said, tokenizer, template=options)))).endswith("<think>\n\n</think>\n\n")
    assert str(tokenizer.decode(list(render(said, tokenizer, template={})))).endswith("assistant\n")
