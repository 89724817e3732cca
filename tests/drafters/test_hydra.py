"""Hydra heads: against their definition, node by node; the published names; what is not supported."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.heads.assemble import named
from drafters.heads.training import Anchors, TargetStates, TextBatch
from drafters.hydra import NAMES, HydraDrafter, TrainedHydra
from specdec.interfaces import Sizes
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.components import hydra_heads
from tests.forwards import drafted, outcome_of, slots_of
from tests.models import tiny_model

VOCAB, HIDDEN = 40, 32


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=VOCAB))


def law(weights: dict[str, Tensor], state: Tensor, embeddings: Tensor, path: list[int]) -> Tensor:
    """The paper's formula for the children of a path from the root on, with weights by their public names."""
    head = len(path) - 1
    x = torch.cat([state, *(embeddings[token] for token in path)])
    for layer in range(2):
        name = f"hydra_mlp.{head}.{layer}"
        z = x @ weights[f"{name}.linear.weight"].T + weights[f"{name}.linear.bias"]
        if f"{name}.res_connection.weight" in weights:
            x = x @ weights[f"{name}.res_connection.weight"].T + weights[f"{name}.res_connection.bias"]
        x = x + z * torch.sigmoid(z)
    return (x @ weights[f"hydra_lm_head.{head}.weight"].T + weights[f"hydra_lm_head.{head}.bias"]).softmax(-1)


@torch.no_grad()
def test_every_node_is_scored_from_its_own_path(target: Target) -> None:
    """The path's tokens count: with others above it, a node's law is another one."""
    heads = hydra_heads(target.model, num_layers=2)
    weights, embeddings = named(heads.state_dict(), NAMES), target.model.get_input_embeddings().weight
    drafter = HydraDrafter(heads, [3, 2, 2], sampling="without_replacement")
    session = drafter.bind(target, Sizes(max_batch_size=2, max_length=50))
    hidden = torch.randn(2, 4, HIDDEN, generator=torch.Generator().manual_seed(0))
    session.observe(outcome_of(torch.zeros(2, 4, dtype=torch.long), [4, 2], hidden_states={-1: hidden}))
    sampling = [SamplingParams(temperature=1.0)] * 2
    tree = drafted(session, slots_of([[0, 5], [0, 6]], vocab_size=VOCAB, max_length=50, params=sampling))
    assert tree.draft_probs is not None
    apart, compared = 0.0, 0
    for row, state in enumerate((hidden[0, 3], hidden[1, 1])):
        parents = tree.parents[row].tolist()
        for node in {parent for parent in parents if parent >= 0}:
            path, at = [], node
            while at >= 0:
                path.insert(0, int(tree.tokens[row, at]))
                at = parents[at]
            wanted = law(weights, state, embeddings, path)
            torch.testing.assert_close(tree.draft_probs[row, node], wanted, rtol=1e-4, atol=1e-5)
            others = [(token + 1) % VOCAB for token in path]
            apart = max(apart, float((law(weights, state, embeddings, others) - wanted).abs().sum()))
            compared += 1
    assert compared == 2 * (1 + 3 + 6) and apart > 0.1


def test_a_checkpoint_comes_back_as_it_was(target: Target, tmp_path: Path) -> None:
    heads = hydra_heads(target.model, num_layers=3)
    heads.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "hydra_lm_head.safetensors")
    assert tensors["hydra_mlp.1.0.res_connection.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert "hydra_mlp.1.2.linear.bias" in tensors and "hydra_lm_head.2.bias" in tensors
    save_file(tensors | {"input_embed_fn.weight": torch.zeros(VOCAB, HIDDEN)}, tmp_path / "hydra_lm_head.safetensors")
    again = HydraDrafter.from_pretrained(tmp_path).heads
    assert again.num_layers == 3
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_training_predicts_what_the_drafter_does(target: Target) -> None:
    """The trained head's logits at a text's own tokens are the heads' over the same path."""
    head = TrainedHydra(depths=3, num_layers=2)
    head.begin(target, None)
    head.head.load_state_dict(hydra_heads(target.model, num_layers=2).state_dict())
    tokens = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))
    batch = TextBatch(tokens, torch.ones_like(tokens).bool(), torch.zeros_like(tokens), torch.arange(9)[None])
    hidden = torch.randn(1, 9, HIDDEN, generator=torch.Generator().manual_seed(2))
    anchors = Anchors.everywhere(batch, 3)
    found = head(batch, TargetStates({-1: hidden}, torch.nn.Identity()), anchors)
    embeddings = target.model.get_input_embeddings().weight
    for row, root in enumerate(anchors.index.tolist()):
        for depth in range(int(anchors.valid[row].sum())):
            joined = torch.cat([hidden[0, root - 1], *embeddings[tokens[0, root : root + depth + 1]]])
            mine = head.logits(found.states[depth][row : row + 1], tokens[0, root + depth][None], depth + 1)[0]
            torch.testing.assert_close(mine, head.head(joined, depth), rtol=1e-4, atol=1e-5)
