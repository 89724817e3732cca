"""The benchmark on a GPU: steps are replayed as CUDA graphs, and the table has its figures."""

from dataclasses import replace

import pytest
import torch

from experiments.bench import gpu
from experiments.bench.gpu import random_target
from experiments.measuring.forwards import Forward, as_graph, fill, forward_batch
from specdec.target.runner import ModelRunner

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("nodes", [1, 5, 16])
def test_a_replayed_step_is_the_step(nodes: int) -> None:
    target = random_target("tiny", CUDA, torch.float32)
    runner = ModelRunner(target.model, max_batch_size=2, max_length=64, max_nodes=nodes)
    fill(runner)
    batch = forward_batch(Forward(batch=2, queries=nodes, context=64), runner.vocab_size, CUDA)
    expected = runner.run(batch).scores.clone()
    graph = as_graph(runner, replace(batch, key_bound=None))
    assert graph is not None
    replayed = graph()
    torch.cuda.synchronize()
    torch.testing.assert_close(replayed.scores, expected, atol=1e-4, rtol=1e-4)  # type: ignore[attr-defined]


def test_the_table_of_a_small_model() -> None:
    table = gpu.measure(CUDA, torch.float32, shape="tiny", context=64, seconds=0.1)
    assert {"plain step, ms", "EAGLE-3 round, ms", "kernels of a plain verify per layer"} <= set(table.what)
