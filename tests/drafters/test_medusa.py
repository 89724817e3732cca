"""Medusa: what is drafted from which hidden state, and what is refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.heads.last_state import DEFAULT_SHAPE
from drafters.medusa import MedusaDrafter, MedusaHeads
from specdec.batch import Batch
from specdec.drafting.scored import ScoredSession
from specdec.interfaces import Sizes
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import TreeShape
from specdec.types import DraftSampling, Outcome
from tests.drafters.medusa_heads import HIDDEN, VOCAB, random_heads
from tests.forwards import drafted, outcome_of, slots_of
from tests.models import tiny_model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=VOCAB))


def bound(target: Target, shape: object = (2, 2), *, heads: MedusaHeads | None = None, batch: int = 3) -> ScoredSession:
    drafter = MedusaDrafter(heads or random_heads(), shape)  # type: ignore[arg-type]
    return drafter.bind(target, Sizes(max_batch_size=batch, max_length=50))


def running(batch: int = 3, *, max_depth: int = 10) -> Batch:
    return slots_of([[0, row + 10] for row in range(batch)], vocab_size=VOCAB, max_depth=max_depth, max_length=50)


def committed(hidden: Tensor, counts: list[int], *, slots: list[int] | None = None) -> Outcome:
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.long)
    return outcome_of(tokens, counts, slots=slots, hidden_states={-1: hidden})


def expected(heads: MedusaHeads, hidden: Tensor, shape: TreeShape) -> list[int]:
    """The drafted tokens from one hidden state, choice by choice."""
    tokens = []
    for path in shape.paths:
        ranking = heads.heads[len(path) - 1](hidden).argsort(descending=True)
        tokens.append(int(ranking[path[-1]]))
    return tokens


@torch.no_grad()
@pytest.mark.parametrize("shape", [3, [3, 2, 1], [(0,), (1,), (0, 0), (0, 3), (0, 3, 1)]])
def test_every_node_takes_its_rank_of_its_head(target: Target, shape: object) -> None:
    heads = random_heads()
    drafter = bound(target, shape, heads=heads)
    hidden = torch.randn(3, 4, HIDDEN)
    drafter.observe(committed(hidden, [4, 1, 2]))
    tree = drafted(drafter, running())
    static = TreeShape.of(shape)  # type: ignore[arg-type]
    assert tree.tokens[:, 0].tolist() == [10, 11, 12]
    last = [hidden[0, 3], hidden[1, 0], hidden[2, 1]]
    assert tree.tokens[:, 1:].tolist() == [expected(heads, state, static) for state in last]
    assert tree.parents.tolist() == [list(static.parents)] * 3 and tree.valid.all()
    assert tree.draft_probs is None and (tree.law == int(DraftSampling.DETERMINISTIC)).all()
    assert (tree.max_depth, tree.max_children) == (static.max_depth, static.max_children)


@torch.no_grad()
def test_the_hidden_state_of_the_latest_commit_counts(target: Target) -> None:
    heads = random_heads()
    drafter = bound(target, 1, heads=heads)
    first, second = torch.randn(3, 2, HIDDEN), torch.randn(2, 3, HIDDEN)
    drafter.observe(committed(first, [2, 2, 2]))
    drafter.observe(committed(second, [3, 1], slots=[2, 0]))
    tokens = drafted(drafter, running()).tokens[:, 1].tolist()
    states = [second[1, 0], first[1, 1], second[0, 2]]
    assert tokens == [int(heads.heads[0](state).argmax()) for state in states]


def test_rows_without_a_hidden_state_propose_nothing(target: Target) -> None:
    drafter = bound(target)
    assert drafted(drafter, slots_of([[10], [11], [12]], vocab_size=VOCAB, max_length=50)).width == 1
    drafter.observe(committed(torch.randn(1, 1, HIDDEN), [1], slots=[1]))
    tree = drafted(drafter, slots_of([[10], [0, 11], [12]], vocab_size=VOCAB, max_length=50))
    assert tree.valid.tolist() == [[True] + [False] * 6, [True] * 7, [True] + [False] * 6]
    assert (tree.children[0] == -1).all() and tree.children[1, 0].tolist() == [1, 2]


def test_heads_that_know_fewer_tokens_than_the_target(target: Target) -> None:
    drafter = bound(target, [2], heads=random_heads(vocab_size=VOCAB - 4))
    drafter.observe(committed(torch.randn(3, 1, HIDDEN), [1, 1, 1]))
    assert drafted(drafter, running()).tokens.max() < VOCAB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_caller_s_heads_stay_as_they_are(target: Target, dtype: torch.dtype) -> None:
    """They may be in training, and a second target may want them in another dtype."""
    heads = random_heads().to(dtype).train()
    heads(torch.randn(1, HIDDEN, dtype=dtype)).sum().backward()
    before = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in heads.parameters()]
    drafter = bound(target, heads=heads)
    drafter.observe(committed(torch.randn(3, 1, HIDDEN), [1, 1, 1]))
    assert drafted(drafter, running()).width > 1
    assert heads.training and all(module.training for module in heads.modules())
    for now, (parameter, value, gradient) in zip(heads.parameters(), before, strict=True):
        assert now is parameter and now.requires_grad and now.grad is gradient is not None
        assert now.dtype is dtype and torch.equal(now, value)
    assert all(p.grad is None and not p.requires_grad for p in drafter.models[0].parameters())


def test_heads_that_fit_are_used_without_a_copy(target: Target) -> None:
    heads = random_heads().train()
    assert bound(target, heads=heads).models[0] is heads
    assert heads.training and all(parameter.requires_grad for parameter in heads.parameters())


@torch.no_grad()
@pytest.mark.parametrize("sampling", ["iid", "without_replacement"])
def test_a_sampled_head_s_q_is_its_softmax_at_the_request_s_temperature(target: Target, sampling: str) -> None:
    heads = random_heads()
    drafter = MedusaDrafter(heads, [2, 1], sampling=sampling)
    assert drafter.laws == {DraftSampling[sampling.upper()]} and drafter.has_leaf_probs
    drafter = drafter.bind(target, Sizes(max_batch_size=3, max_length=50, leaf_probs=True))
    hidden = torch.randn(3, 1, HIDDEN)
    drafter.observe(committed(hidden, [1, 1, 1]))
    params = [SamplingParams(temperature=t) for t in (0.5, 1.0, 2.0)]
    tree = drafted(drafter, slots_of([[0, 10], [0, 11], [0, 12]], vocab_size=VOCAB, params=params, max_length=50))
    depths = [0, 1, 1, 2, 2]
    for row, temperature in enumerate((0.5, 1.0, 2.0)):
        for node, depth in enumerate(depths):  # leaves included
            wanted = (heads.heads[depth](hidden[row, 0]) / temperature).softmax(-1)
            torch.testing.assert_close(tree.draft_probs[row, node], wanted, atol=1e-5, rtol=1e-4)


def test_a_leaf_s_law_takes_one_more_head() -> None:
    assert MedusaDrafter(random_heads(3), 2, sampling="iid").has_leaf_probs
    assert not MedusaDrafter(random_heads(3), 3, sampling="iid").has_leaf_probs


def test_a_row_that_is_not_ready_has_no_q_at_the_leaves(target: Target) -> None:
    drafter = MedusaDrafter(random_heads(), 2, sampling="iid")
    drafter = drafter.bind(target, Sizes(max_batch_size=3, max_length=50, leaf_probs=True))
    drafter.observe(committed(torch.randn(1, 1, HIDDEN), [1], slots=[1]))
    params = [SamplingParams(temperature=1.0)] * 3
    tree = drafted(drafter, slots_of([[10], [0, 11], [12]], vocab_size=VOCAB, params=params, max_length=50))
    assert tree.valid[:, 1:].tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert not tree.draft_probs[[0, 2]].any() and tree.draft_probs[1].any()


def test_the_default_shape_is_as_deep_as_there_are_heads(tmp_path: Path) -> None:
    random_heads(5).save_pretrained(tmp_path)
    assert MedusaDrafter.from_pretrained(tmp_path).shape == DEFAULT_SHAPE
    assert MedusaDrafter(random_heads(2)).shape == DEFAULT_SHAPE.cut(2)
    assert MedusaDrafter.from_pretrained(tmp_path, shape=[2, 1]).shape == TreeShape.branching(2, 1)
