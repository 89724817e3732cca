"""The engine's benchmark on a GPU: steps are replayed as CUDA graphs, and every section has its figures."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.bench.engine import run as command
from experiments.bench.engine.steps import Setting, make_runner, measure_step, step_batch
from experiments.bench.models import make_target
from experiments.measuring.forwards import as_graph

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("nodes", [1, 5, 16])
def test_a_replayed_step_is_the_step(nodes: int) -> None:
    target = make_target("tiny", CUDA, torch.float32)
    setting = Setting(batch=2, nodes=nodes, context=64)
    runner = make_runner(target, setting, nodes)
    batch = step_batch(setting, runner.vocab_size, CUDA)
    expected = runner.run(batch).scores.clone()
    graph = as_graph(runner, replace(batch, key_bound=None))
    assert graph is not None
    replayed = graph()
    torch.cuda.synchronize()
    torch.testing.assert_close(replayed.scores, expected, atol=1e-4, rtol=1e-4)  # type: ignore[attr-defined]
    record = measure_step(runner, setting, repeats=2, limit=2.0)
    assert record["executor"] == "CudaGraph" and record["captured"]


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["model=tiny", "device=cuda", "tokens=8", "repeats=1", "seconds=60", f"out={tmp_path}"]
    grid = ["nodes=[1,5]", "batch=[1,2]", "context=[64,32]", "schemes=[]"]
    monkeypatch.setattr(sys, "argv", ["experiments.bench.engine", *words, *grid])
    command.main()
    found = json.loads((tmp_path / "results.json").read_text())
    assert {step["executor"] for step in found["steps"]} >= {"CudaGraph"}
    assert found["memory"]["counted"] and found["memory"]["peak"] >= found["memory"]["weights"]
    assert all(each["stages"]["verify"] > 0 for each in found["rounds"])
