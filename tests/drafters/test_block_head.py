"""The head of a block drafter: against its definition, and as training sees it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafters.heads.block import BlockHead, default_layers
from drafters.heads.markov import MarkovHead
from specdec.forward import LOGITS, ForwardBatch, Wants
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from specdec.topology import Topology
from tests.drafters.blocks import ROWS, VOCAB, context_of, dense_logits, head_for
from tests.models import tiny_model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=VOCAB))


WINDOW = {"sliding_window": 6, "use_sliding_window": True}


def forward_block(runner: ModelRunner, head: BlockHead, features: Tensor, tokens: Tensor, topology: Topology) -> Tensor:
    """The logits of one block a row: the context in two pieces, into slots that are not in order."""
    slots = np.array([2, 0, 3])
    lengths = np.array(ROWS)
    for start, stop in ((0, 4), (4, 7)):
        piece = features[:, start:stop]
        runner.run(
            ForwardBatch(
                tokens=torch.zeros(piece.shape[:2], dtype=torch.long),
                slots=torch.from_numpy(slots),
                lengths=torch.full((3,), start),
                topology=Topology.chain(piece.shape[1], runner.device),
                features=piece,
                wants=Wants(logits=0),
            )
        )
    output = runner.run(
        ForwardBatch(
            tokens=tokens,
            slots=torch.from_numpy(slots),
            lengths=torch.from_numpy(lengths),
            topology=topology,
            wants=LOGITS,
        )
    )
    return output.scores


@pytest.mark.parametrize(
    ("settings", "attention"),
    [
        ({}, "grouped"),
        ({}, "eager"),
        ({"causal": True}, "grouped"),
        ({"layer_kind": "llama"}, "grouped"),
        ({"layer_types": ["full_attention", "sliding_attention"], **WINDOW}, "grouped"),
        ({"layer_types": ["sliding_attention", "sliding_attention"], **WINDOW, "causal": True}, "eager"),
        ({"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0}, "grouped"),
    ],
)
def test_a_block_behind_its_context_is_what_the_papers_define(
    target: Target, settings: dict[str, Any], attention: str
) -> None:
    """Ragged rows, one without any context; again once the forward is captured."""
    head = head_for(target, **settings)
    runner = ModelRunner(
        head.bound(target.model), max_batch_size=4, max_length=32, max_nodes=4, attention=attention, optimize=True
    )
    width = head.config.block_size
    topology = Topology.chain(width, runner.device) if head.config.causal else Topology.block(width, runner.device)
    features = context_of(head)
    tokens = torch.full((3, width), VOCAB - 1)
    tokens[:, 0] = torch.tensor([5, 9, 11])
    wanted = [
        dense_logits(head, target, features[row, :length], tokens[row].tolist(), causal=head.config.causal)
        for row, length in enumerate(ROWS)
    ]
    for _ in range(30 if attention == "grouped" else 1):  # more than it takes to be captured
        found = forward_block(runner, head, features, tokens, topology)
    for row in range(3):
        torch.testing.assert_close(found[row].double(), wanted[row], atol=2e-4, rtol=2e-4)
    if attention == "grouped":
        assert runner.executor.recordings.keys, "nothing was captured"


def test_slots_that_see_each_other_keep_their_positions() -> None:
    block, chain = Topology.block(3, torch.device("cpu")), Topology.chain(3, torch.device("cpu"))
    assert block.ancestors.all() and block.both_ways and not block.in_line
    assert torch.equal(block.depth, chain.depth) and torch.equal(block.parents, chain.parents)
    assert block.first(2).ancestors.tolist() == [[[True, True], [True, True]]]
    assert block.ancestor_words.tolist() == [[[7], [7], [7]]]
    assert Topology.block(3, torch.device("cpu")) is block, "made once"
    assert not chain.ancestors.all(), "the chain is left as it is"


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_markov_head_is_what_the_paper_defines(kind: str) -> None:
    torch.manual_seed(0)
    head = MarkovHead(kind, vocab_size=9, draft_vocab_size=7, hidden_size=6, rank=4).double()
    previous, hidden = torch.tensor([[3, 0, 8]]), torch.randn(1, 3, 6).double()
    path = None
    weights, state = {name: tensor.numpy() for name, tensor in head.state_dict().items()}, np.zeros(4)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    for slot in range(3):
        found, path = head(previous[:, slot], hidden[:, slot] if head.reads_hidden else None, path)
        known, h = weights["markov_w1.weight"][previous[0, slot]], hidden[0, slot].numpy()
        if kind == "gated":
            gate = weights["gate_proj.weight"] @ np.concatenate([h, known]) + weights["gate_proj.bias"]
            known = sigmoid(gate) * known
        if kind == "rnn":
            joint = weights["joint_proj.weight"] @ np.concatenate([state, known, h]) + weights["joint_proj.bias"]
            g, c, o = joint[:4], joint[4:8], joint[8:]
            state, known = sigmoid(g) * state + (1 - sigmoid(g)) * np.tanh(c), np.tanh(o)
        np.testing.assert_allclose(found[0].numpy(), weights["markov_w2.weight"] @ known, atol=1e-12)


def test_the_usual_layers() -> None:
    assert default_layers(36, 5) == [1, 9, 17, 25, 33]
    assert default_layers(28, 1) == [14]
