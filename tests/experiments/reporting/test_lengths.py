"""Tokens per round of what a study varies in two ways: of one run by its labels, of a sweep by its overrides."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments.sweep.callbacks import Report
from tests.experiments.made_runs import made
from tests.experiments.results.outputs import output

LENGTHS = "experiments.reporting.studies.lengths.report_lengths"
LABELS = {"a": "chain: none", "b": "chain: Markov", "c": "drawn tree: none"}
ACCEPTED = {"a": (0, 1), "b": (1, 1), "c": (2, 2)}


def run(job: Path, *overrides: str, more: int = 0) -> None:
    """Write a run of three methods on three prompts as Hydra leaves it: greedily, and with less drafted at T = 1."""
    (job / ".hydra").mkdir(parents=True)
    (job / ".hydra" / "config.yaml").write_text("out: ${hydra:runtime.output_dir}\n")
    (job / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    records = []
    for number in range(3):
        records += [output(f"p{number}", "plain", accepted=(0,) * 4, temperature=at) for at in (0.0, 1.0)]
        for method, accepted in ACCEPTED.items():
            drafted: Any = {"proposed_depth": (2, 2), "proposed_nodes": (4, 2)}
            records.append(output(f"p{number}", method, accepted=tuple(more + a for a in accepted), **drafted))
            # Only the last prompt's second round accepts anything more here: not enough to tell methods apart.
            last = (0, int(number == 2 and method != "a"))
            records.append(output(f"p{number}", method, accepted=last, temperature=1.0, **drafted))
    config: Any = {"dataset": {"seed": more}, "sampling": {"max_new_tokens": 4}, "target": {}, "labels": LABELS}
    made(job, *overrides, records=records, config=config, threads=1, series=8)


def test_families_are_columns_and_differences_are_from_the_first_row(tmp_path: Path) -> None:
    run(tmp_path)
    report = Report(LENGTHS, single=True, rows="head", about="Heads")
    report.on_run_end(OmegaConf.create({"hydra": {"run": {"dir": str(tmp_path)}}}))
    text = (tmp_path / "lengths.md").read_text()
    assert text.startswith(
        "Heads. bundled/target, float32, a processor, stdlib, 3 prompts, seed 0, 4 new tokens, commit"
    )
    assert "tokens per round / drafted nodes per round; signed: more than none has in the same column" in text
    assert [line for line in text.split("\n") if line.startswith(("| none", "| Markov", "| head"))] == [
        "| head \\ column | chain | drawn tree |",
        "| none | 1.50 [1.50, 1.50] / 3.0 | 3.00 [3.00, 3.00] / 3.0 |",
        "| Markov | 2.00 [2.00, 2.00] +0.50* / 3.0 | - |",
        "| head \\ column | chain | drawn tree |",
        "| none | 1.00 [1.00, 1.00] / 3.0 | 1.17 [1.00, 1.50] / 3.0 |",
        "| Markov | 1.17 [1.00, 1.50] +0.17 / 3.0 | - |",
    ]
    assert (tmp_path / "lengths.png").exists()


def test_overrides_name_the_columns_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "0", "sampling=code", "mask=true", more=1)
    run(tmp_path / "1", "sampling=code", "mask=false")
    run(tmp_path / "2", "mask=maybe")
    (tmp_path / "2" / "records.jsonl").unlink()
    columns = {"sampling=code": "code", "mask=true": "masked", "mask=false": "free"}
    report = Report(LENGTHS, single=True, rows="drafts", about="Masks", columns=columns)
    report.on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    text = (tmp_path / "lengths.md").read_text()
    assert "stdlib, 3 prompts, seed 0 or stdlib, 3 prompts, seed 1, 4 new" in text
    assert "| drafts \\ column | code, masked | code, free |" in text
    assert "| chain: none | 2.50 [2.50, 2.50] / 3.0 | 1.50 [1.50, 1.50] / 3.0 |" in text
    assert "NO RESULT of job 2" in text and "signed" not in text
    report.options["columns"] = {"sampling=code": "code"}
    report.on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    assert "'chain: none' stands twice in the column 'code': name what differs" in capsys.readouterr().err
