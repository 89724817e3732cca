"""Chat templates with thinking on and off: what is rendered, what the manifest says, what may be compared."""

import json
import shutil
from pathlib import Path

import pytest

from experiments.datasets.prompt import Prompt
from experiments.measuring.jobs import render, template_facts
from experiments.reporting.comparison import report_comparison
from experiments.results.comparison import paired_differences
from experiments.results.runs import find_folders, load_run
from tests.experiments.conftest import byte_tokenizer
from tests.experiments.runs import launched

pytestmark = pytest.mark.usefixtures("no_pictures")

TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif -%}"
)
"""A template like Qwen3's: without thinking, the answer begins with an empty thought."""


@pytest.fixture
def thinker(saved: Path, tmp_path: Path) -> Path:
    """A target whose tokenizer has the template."""
    folder = tmp_path / "thinker"
    shutil.copytree(saved / "target", folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_a_sweep_over_thinking_is_paired_and_marked_and_compare_refuses_to_mix(
    thinker: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"turns": [f"What is {number} and {number}?"]} for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [text for text in tiny if not text.startswith(("out=", "target", "dataset", "drafter"))]
    words += [f"target.name={thinker}", "dataset=jsonl", f"dataset.file={tmp_path / 'rows.jsonl'}", "drafter=ngram"]
    given = "chat_template={enable_thinking: true},{enable_thinking: false}"
    folder = tmp_path / "sweep"
    assert launched("-m", *words, given, f"hydra.sweep.dir={folder}", monkeypatch=monkeypatch) == 0
    told = capsys.readouterr().out
    assert "MIXED: the runs differ in their chat template: enable_thinking=True, hash=" in told
    runs = [load_run(found) for found in find_folders([str(folder)])]
    on, off = (run.manifest["template"] for run in runs)
    assert on["enable_thinking"] and not off["enable_thinking"] and on["hash"] == off["hash"]
    lengths = [[record.prompt_tokens for record in run.outputs.itertuples()] for run in runs if run.outputs is not None]
    assert {after - before for before, after in zip(*lengths, strict=True)} == {len("<think>\n\n</think>\n\n")}
    with pytest.raises(ValueError, match="differ in their chat template: enable_thinking=True"):
        report_comparison(runs, tmp_path / "out")
    rows = report_comparison(runs, tmp_path / "out", allow_mixed=True)
    setting, found = paired_differences(rows)
    assert setting == "chat_template" and [row["prompts"] for row in found] == [3]
    assert (folder / "differences.csv").is_file()


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
