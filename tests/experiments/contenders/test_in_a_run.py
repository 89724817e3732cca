"""Other engines in a whole run, chosen on the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from experiments.results.records import read_records
from experiments.run import run


@pytest.mark.usefixtures("no_pictures")
def test_contenders_are_interleaved_with_ours(
    configure: Callable[..., DictConfig], saved: Path, tiny: list[str], tmp_path: Path
) -> None:
    config = configure(
        "run", *tiny, "dataset.count=2", "warmup_prompts=0", "drafter=ngram", "method=ngram", "target.dtype=float32",
        "+contender=[hf_prompt_lookup,hf_assisted]", "sampling.max_new_tokens=6",
        f"contenders.hf_assisted.assistant={saved / 'drafter'}",
    )  # fmt: skip
    run(config)
    records = read_records(tmp_path / "out" / "records.jsonl")
    methods = ["plain", "ngram", "hf_prompt_lookup", "hf_assisted"]
    assert [record.method for record in records] == methods * 2
    assert len({record.token_ids for record in records if record.prompt == records[0].prompt}) == 1
    assert all(record.equals_plain for record in records if record.method != "plain")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    lookup = summary["methods"][2]
    assert lookup["speedup"] > 0 and lookup["mean_acceptance_length"] >= 1 and lookup["draft_acceptance_rate"] is None
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["exactness"]["hf_assisted"] == "exact (declared)"
    assert manifest["series"] == 4
