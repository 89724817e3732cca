"""A sequence's logits in invariant mode, computed in one forward, in several, and along a tree."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import DraftTree, ForwardBatch, ModelRunner, Topology, TreeShape, Wants
from tests.forwards import prefill, verify

VOCAB = 64
SEQUENCE = 28
SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 1), (1, 0, 0), (1, 0, 1), (1, 0, 1, 0)])
PATH = torch.nonzero(Topology.of_shape(SHAPE, torch.device("cpu")).ancestors[0, -1])[:, 0].tolist()
"""The path to the deepest node, with other nodes in between."""


def runner_for(model: PreTrainedModel) -> ModelRunner:
    return ModelRunner(model, max_batch_size=3, max_length=SEQUENCE + 8, max_nodes=SHAPE.num_nodes, invariant=True)


def tokens(count: int = SEQUENCE, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def chain(runner: ModelRunner, given: Tensor, *, start: int = 0, slot: int = 0) -> Tensor:
    """Logits of a line of tokens behind the first ``start`` of a slot, which become final."""
    if not start:
        runner.cache.vacate(slot)
    piece = ForwardBatch.of_chunk(given[None], host_slots=np.array([slot]), host_lengths=np.array([start]))
    return runner.run(replace(piece, wants=Wants())).scores[0]


def one_by_one(runner: ModelRunner, given: Tensor) -> Tensor:
    """Logits as plain decoding computes them."""
    return torch.cat([chain(runner, given[i : i + 1], start=i) for i in range(len(given))])


def trees(runner: ModelRunner, given: Tensor, starts: Sequence[int], slots: Sequence[int]) -> Tensor:
    """Logits of one tree per slot, whose deepest path holds the sequence's tokens and whose other nodes are random."""
    for slot, start in zip(slots, starts, strict=True):
        runner.cache.vacate(slot)
        prefill(runner, given[None, :start], np.zeros(1, dtype=np.int64), slots=[slot])
    drafted = tokens(len(slots) * (SHAPE.num_nodes + 1), seed=1).view(len(slots), -1).to(given.device)
    for row, start in enumerate(starts):
        drafted[row, PATH] = given[start : start + len(PATH)]
    return verify(runner, DraftTree.from_shape(SHAPE, drafted), starts, slots=slots).scores


def same(logits: Tensor, wanted: Tensor) -> bool:
    return torch.equal(logits.view(torch.uint8), wanted.view(torch.uint8))


PROMPTS = [tokens(count, seed).tolist() for seed, count in enumerate((5, 1, 30, 9))]
