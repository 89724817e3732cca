"""A row per engine: who, how fast, with which versions, and what is said beside it."""

from pathlib import Path
from typing import Any

from experiments.reporting.engines import engines_document
from experiments.results.records import RecordWriter
from experiments.results.runs import load_run
from tests.experiments.made_runs import made
from tests.experiments.results.outputs import output

LABELS = {"plain": "ours: plain", "model": "ours: small model", "their": "Theirs: plain", "fast": "Theirs: small model"}
FACTS: dict[str, Any] = {
    "config": {"labels": LABELS, "sampling": {"max_new_tokens": 6}},
    "versions": {"specdec": "0.1.0"}, "contenders": {"their": "Theirs 1.2, torch 2", "fast": "Theirs 1.2, torch 2"},
    "start_seconds": {"their": 3.1, "fast": 20.4}, "threads": 2, "series": 4,
}  # fmt: skip


def test_every_engine_has_a_row_with_its_version_and_what_is_not_counted_is_said(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "experiment=engines", "out=x", **FACTS)
    with RecordWriter(folder / "records.jsonl", append=True) as writer:
        for number in range(3):
            shared: dict[str, Any] = {"tokens": 6, "batch": number, "load": {"own": 1.5, "others": 0.1, "cores": 2}}
            writer.write(output(f"p{number}", "their", seconds=4.0, accepted=(0,) * 6, **shared))
            ended: dict[str, Any] = {"error": "gone", "finish_reason": "error"} if number == 2 else {}
            writer.write(output(f"p{number}", "fast", seconds=1.0, accepted=(2, 2), **shared, **ended))
    text = engines_document(load_run(folder))
    assert text.startswith("`python -m experiments.run experiment=engines`: bundled/target, ")
    assert "| T | engine | plain | small model |" in text
    ours, theirs = (line for line in text.splitlines() if line.startswith("| 0 |"))
    assert ours.startswith("| 0 | specdec 0.1.0 | 3 | 5; 1.82x [")
    assert ours.endswith("; 2.11 |"), "19 tokens in 9 rounds"
    assert theirs.startswith("| 0 | Theirs 1.2, torch 2 | 2; 0.50x [0.50, 0.50] | 6; 2.00x [")
    assert "cores used: ours - / Theirs 1.50; the longest start, not counted: Theirs 20 s" in text
    assert "Theirs: small model failed on 1 prompts" in text and "2 threads of a processor, commit 0123456789" in text
