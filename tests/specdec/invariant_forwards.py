"""A sequence's logits in invariant mode, computed in one forward, in several, and along a tree."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import DraftTree, ForwardBatch, ModelRunner, Topology, TreeShape
from specdec.execution.invariant import InvariantExecutor
from tests.forwards import prefill, verify
from tests.models import tiny_model

VOCAB = 64
SEQUENCE = 28
SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 1), (1, 0, 0), (1, 0, 1), (1, 0, 1, 0)])
PATH = torch.nonzero(Topology.of_shape(SHAPE, torch.device("cpu")).ancestors[0, -1])[:, 0].tolist()
"""The path to the deepest node, with other nodes in between."""


def model_in(dtype: torch.dtype, architecture: str = "llama", **more: Any) -> PreTrainedModel:
    return tiny_model(architecture, vocab_size=VOCAB, **more).to(dtype)  # type: ignore[arg-type]


def runner_for(model: PreTrainedModel, *, slots: int = 3, length: int = SEQUENCE + 8) -> ModelRunner:
    nodes = SHAPE.num_nodes
    return ModelRunner(model, max_batch_size=slots, max_length=length, max_nodes=nodes, invariant=True)


def tokens(count: int = SEQUENCE, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def chain(runner: ModelRunner, given: Tensor, *, start: int = 0, slot: int = 0) -> Tensor:
    """Logits of a line of tokens behind the first ``start`` of a slot, which become final."""
    if not start:
        runner.cache.vacate(slot)
    host_slots, host_lengths = np.array([slot]), np.array([start])
    batch = ForwardBatch(
        tokens=given[None],
        slots=torch.from_numpy(host_slots).to(given.device),
        lengths=torch.from_numpy(host_lengths).to(given.device),
        topology=Topology.chain(len(given), given.device),
        counts=np.array([len(given)]),
    )
    return runner.run(batch).scores[0]


def one_by_one(runner: ModelRunner, given: Tensor) -> Tensor:
    """Logits as plain decoding computes them."""
    return torch.cat([chain(runner, given[i : i + 1], start=i) for i in range(len(given))])


def trees(runner: ModelRunner, given: Tensor, starts: Sequence[int], slots: Sequence[int], seed: int = 1) -> Tensor:
    """Logits of one tree per slot, whose deepest path holds the sequence's tokens and whose other nodes are random."""
    for slot, start in zip(slots, starts, strict=True):
        runner.cache.vacate(slot)
        prefill(runner, given[None, :start], np.zeros(1, dtype=np.int64), slots=[slot])
    drafted = torch.randint(0, VOCAB, (len(slots), SHAPE.num_nodes + 1), generator=torch.Generator().manual_seed(seed))
    drafted = drafted.to(given.device)
    for row, start in enumerate(starts):
        drafted[row, PATH] = given[start : start + len(PATH)]
    return verify(runner, DraftTree.from_shape(SHAPE, drafted), starts, slots=slots).scores


def same(logits: Tensor, wanted: Tensor) -> bool:
    return torch.equal(logits.view(torch.uint8), wanted.view(torch.uint8))


PROMPTS = [tokens(count, seed).tolist() for seed, count in enumerate((5, 1, 30, 9))]


def executor_of(runner: ModelRunner) -> InvariantExecutor:
    assert isinstance(runner.executor, InvariantExecutor)
    return runner.executor
