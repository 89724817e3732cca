"""Results of vllm bench serve and of GuideLLM as studies of ours."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.commands.compare import compare
from experiments.load.figures import latencies
from experiments.load.run import load_runs
from experiments.load.studies import import_results
from tests.experiments.conftest import composed

VLLM = {
    "model_id": "m",
    "request_rate": 2.0,
    "max_concurrency": None,
    "start_times": [100.0, 100.5, 101.0],
    "ttfts": [0.5, 0.25, 0.0],
    "itls": [[0.25, 0.25], [0.5], []],
    "input_lens": [7, 8, 9],
    "output_lens": [5, 2, 0],
    "errors": ["", "", "gone"],
}
ONE = {"request_start_time": 10.0, "request_end_time": 12.0, "time_to_first_token_ms": 500.0}
GUIDE = {
    "args": {"model": "m"},
    "benchmarks": [
        {
            "config": {"strategy": {"type_": "constant", "rate": 2.0}},
            "requests": {
                "successful": [{**ONE, "prompt_tokens": 7, "output_tokens": 4}],
                "errored": [{"request_start_time": 9.0, "request_end_time": 9.5, "time_to_first_token_ms": None}],
                "incomplete": [],
            },
        }
    ],
}


def written(told: Any, path: Path) -> Path:
    path.write_text(json.dumps(told))
    return path


def test_moments_and_tokens_of_vllm(tmp_path: Path) -> None:
    (run,) = load_runs(import_results(written(VLLM, tmp_path / "vllm.json"), tmp_path / "study"))
    found = latencies(run)
    assert (run.method, run.rate, run.loop, run.seconds) == ("vllm", 2.0, "open", 1.25)
    assert found.outcome.tolist() == ["done", "done", "failed"] and found.reason[2] == "gone"
    assert found.ttft.dropna().tolist() == [0.5, 0.25] and found.e2e.dropna().tolist() == [1.0, 0.75]
    assert found.tpot.dropna().tolist() == [0.5 / 4, 0.5], "over tokens, not over chunks"
    assert found.prompt_tokens.tolist() == [7, 8, 9]


def test_moments_and_tokens_of_guidellm_and_both_in_one_table(tmp_path: Path) -> None:
    (run,) = load_runs(import_results(written(GUIDE, tmp_path / "g.json"), tmp_path / "study"))
    found = latencies(run)
    assert found.outcome.tolist() == ["failed", "done"] and found.arrived.tolist() == [0, 1]
    assert found.ttft[1] == 0.5 and found.tpot[1] == 0.5 and found.e2e[1] == 2.0
    paths = [written(VLLM, tmp_path / "vllm.json"), tmp_path / "study"]
    compare(composed("compare", f"runs=[{paths[0]},{paths[1]}]", f"out={tmp_path / 'out'}"))
    text = (tmp_path / "out" / "load.md").read_text()
    assert "| vllm" in text and "| g" in text and "another load generator" in text


@pytest.mark.parametrize("told", [[], {}, {**VLLM, "ttfts": [1.0]}, {"benchmarks": [{"requests": {}}]}])
def test_other_files_are_refused(told: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.json is no result of another load generator .*: give the JSON of vllm"):
        import_results(written(told, tmp_path / "x.json"), tmp_path / "study")
