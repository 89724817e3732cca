"""ReDrafter: beams and laws against the published description, its public layout, and its training."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafters.redrafter import ReDrafter, TrainedRecurrent
from specdec import DraftSampling, SamplingParams, Sizes, Target
from specdec.drafting.builders import BeamSearchTree
from specdec.drafting.scored import ScoredSession
from tests.components import recurrent_head
from tests.drafters.agreeing import compared
from tests.forwards import drafted, inner_paths, outcome_of, slots_of

HIDDEN, VOCAB = 32, 64
KINDS = [{}, {"rnn": False}, {"exit_size": 48}, {"num_layers": 0}]


def law(weights: dict[str, Tensor], hidden: Tensor, embeddings: Tensor, path: list[int]) -> Tensor:
    """The logits of the children of a path from the root on, with weights by their public names."""
    state = torch.zeros(HIDDEN)
    for token in path:
        if "rnn_w.weight" in weights:
            z = embeddings[token] @ weights["rnn_w.weight"].T + state @ weights["rnn_u.weight"].T
            z = z + weights["rnn_u.bias"]
            state = z * torch.sigmoid(z)
        else:
            state = state + embeddings[token]
    x, layer = torch.cat([hidden, state]), 0
    if "input_proj.weight" in weights:
        x = x @ weights["input_proj.weight"].T + weights["input_proj.bias"]
    while f"lm_head.{layer}.linear.weight" in weights:
        z = x @ weights[f"lm_head.{layer}.linear.weight"].T + weights[f"lm_head.{layer}.linear.bias"]
        x, layer = x + z * torch.sigmoid(z), layer + 1
    return x @ weights[f"lm_head.{layer}.weight"].T


def beams(score: Callable[[list[int]], Tensor], root: int, width: int, depth: int, among: int) -> set[tuple[int, ...]]:
    """The beginnings of all beams of a search, one beam after another."""
    found = [((root,), 0.0)]
    for _ in range(depth):
        offers = []
        for path, worth in found:
            logits = score(list(path))
            kept = logits >= logits.topk(among).values[-1]
            logs = logits.where(kept, -torch.inf).log_softmax(-1)
            offers += [((*path, token), worth + float(logs[token])) for token in range(VOCAB)]
        found = sorted(offers, key=lambda offer: -offer[1])[:width]
    return {path[1:end] for path, _ in found for end in range(2, len(path) + 1)}


def begun(target: Target, drafter: ReDrafter, hidden: Tensor, counts: list[int]) -> ScoredSession:
    session = drafter.bind(target, Sizes(max_batch_size=len(hidden), max_length=50))
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.long)
    session.observe(outcome_of(tokens, counts, hidden_states={-1: hidden}))
    return session


@torch.no_grad()
def test_the_tree_is_what_a_beam_search_ends_with(target: Target) -> None:
    """Every row ends where it has room; common beginnings of beams stand once."""
    head = recurrent_head(target.model)
    weights, embeddings = head.state_dict(), target.model.get_input_embeddings().weight
    hidden = torch.randn(3, 4, HIDDEN, generator=torch.Generator().manual_seed(0))
    session = begun(target, ReDrafter(head, BeamSearchTree(5, 4, among=9)), hidden, [4, 2, 1])
    sizes = set()
    for temperature in (0.0, 1.0):
        batch = slots_of(
            [[0, 5], [0, 6], [0, 7]], vocab_size=VOCAB, max_length=50, max_depth=[4, 2, 3],
            params=[SamplingParams(temperature=temperature)] * 3,
        )  # fmt: skip
        tree = drafted(session, batch)
        assert tree.draft_probs is None and (tree.law == int(DraftSampling.DETERMINISTIC)).all()
        for row, (state, depth) in enumerate(zip((hidden[0, 3], hidden[1, 1], hidden[2, 0]), (4, 2, 3), strict=True)):
            paths: dict[int, tuple[int, ...]] = {0: ()}
            for node in range(1, tree.width):
                if tree.valid[row, node]:
                    paths[node] = (*paths[int(tree.parents[row, node])], int(tree.tokens[row, node]))

            def score(path: list[int], state: Tensor = state) -> Tensor:
                return law(weights, state, embeddings, path)

            wanted = beams(score, 5 + row, 5, depth, 9)
            assert len(set(paths.values())) == len(paths), "siblings are distinct"
            assert set(paths.values()) - {()} == wanted
            assert wanted != beams(score, 5 + row, 4, depth, 9), "the mutant: other beams"
            sizes.add(len(wanted))
    assert len(sizes) > 1


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "sampling"), [(3, "iid"), ([2, 2, 1], "without_replacement")])
def test_every_node_is_drawn_from_the_law_of_its_own_path(
    target: Target, kind: dict[str, object], shape: object, sampling: str
) -> None:
    head = recurrent_head(target.model, **kind)
    weights, embeddings = head.state_dict(), target.model.get_input_embeddings().weight
    hidden = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(0))
    drafter = ReDrafter(head, shape, sampling=sampling)  # type: ignore[arg-type]
    assert drafter.laws == {DraftSampling[sampling.upper()]}
    params = [SamplingParams(temperature=0.7)] * 2
    batch = slots_of([[0, 5], [0, 6]], vocab_size=VOCAB, max_length=50, params=params)
    tree = drafted(begun(target, drafter, hidden, [3, 1]), batch)
    assert tree.draft_probs is not None
    apart = 0.0
    for row, state in enumerate((hidden[0, 2], hidden[1, 0])):
        for node, path in inner_paths(tree, row).items():
            wanted = (law(weights, state, embeddings, path) / 0.7).softmax(-1)
            torch.testing.assert_close(tree.draft_probs[row, node], wanted, rtol=1e-3, atol=1e-5)
            others = (law(weights, state, embeddings, [(path[0] + 1) % VOCAB, *path[1:]]) / 0.7).softmax(-1)
            apart = max(apart, float((others - wanted).abs().sum()))
    assert apart > 0.1, "the mutant: another root"


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_comes_back_as_it_was(target: Target, kind: dict[str, object], tmp_path: Path) -> None:
    head = recurrent_head(target.model, **kind)
    head.save_pretrained(tmp_path)
    tensors, stored = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    layers = head.num_layers
    assert set(tensors) == {
        *(f"lm_head.{i}.linear.{part}" for i in range(layers) for part in ("weight", "bias")),
        f"lm_head.{layers}.weight",
        *(("rnn_u.weight", "rnn_u.bias", "rnn_w.weight") if head.rnn else ()),
        *(("input_proj.weight", "input_proj.bias") if "exit_size" in kind else ()),
    }
    assert stored["model_type"] == "recurrent_drafting_drafter" and stored["exit_dim"] == kind.get("exit_size", 64)
    (tmp_path / "config.json").write_text(json.dumps({"num_draft_layers": 7, "rnn": not head.rnn}))
    again = ReDrafter.from_pretrained(tmp_path)
    assert again.max_nodes == 40 and again.max_depth == 4
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.heads.state_dict()[name], tensor), name


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS[:2])
def test_it_is_trained_as_it_is_served(target: Target, kind: dict[str, object]) -> None:
    head = TrainedRecurrent(depths=3, **kind)  # type: ignore[arg-type]
    head.begin(target, None)
    head.head.load_state_dict(recurrent_head(target.model, **kind).state_dict())
    weights, embeddings = head.head.state_dict(), target.model.get_input_embeddings().weight
    assert compared(head, lambda states, tokens: law(weights, states[-1], embeddings, tokens).log_softmax(-1)) > 20
