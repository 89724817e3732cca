"""The rules that try all nodes of a static shape at once: the same laws as those that try one sibling after another."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import verifiers.thresholds
from experiments.bench.rules import SHAPES
from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.tables import Tables
from specdec.interfaces import Verifier
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.verifiers.cases import BIASED, EXACT, IID, SWOR
from verifiers import RejectionVerifier, TraversalVerifier
from verifiers.thresholds import has_thresholds

RULES: dict[str, Verifier] = {"rejection": RejectionVerifier(), "traversal": TraversalVerifier()}
MORE_SHAPES = {
    **SHAPES,
    "two first children": TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 2), (0, 0, 0)]),
    "one level": TreeShape.branching(5),
}


def drafted(
    shape: TreeShape,
    law: DraftSampling,
    *,
    seed: int,
    invalid: float,
    dtype: torch.dtype = torch.float64,
    vocab: int = 12,
    batch: int = 16,
) -> tuple[DraftTree, Tensor]:
    """Drafts as a drafter draws them, from sharp tables with zeros; ``invalid`` of the nodes and all below them are."""
    generator = torch.Generator().manual_seed(seed)
    nodes = shape.num_nodes + 1
    logits = 2 * torch.randn(2, batch, nodes, vocab, generator=generator, dtype=torch.float64)
    # Without replacement, a drafter marks siblings as invalid once q has run out of tokens.
    dropped = torch.rand(logits.shape, generator=generator) < (0.2 if invalid or law is IID else 0.0)
    p, q = logits.masked_fill(dropped, -torch.inf).softmax(-1)
    tokens = torch.randint(0, vocab, (batch, nodes), generator=generator)
    valid = torch.rand(batch, nodes, generator=generator) >= invalid
    valid[:, 0] = True
    parents, taken = shape.parents, {}
    for node in range(1, nodes):
        row = q[:, parents[node]].clone()
        if law is SWOR:
            for sibling in taken.get(parents[node], []):
                row[torch.arange(batch), tokens[:, sibling]] = 0
        valid[:, node] &= valid[:, parents[node]] & (row.sum(-1) > 0)
        drawn = torch.multinomial(row + 1e-300, 1, generator=generator)[:, 0]
        tokens[:, node] = torch.where(valid[:, node], drawn, tokens[:, 0])
        # An invalid sibling took nothing away.
        if law is SWOR:
            q_row = q[:, parents[node]]
            tokens[:, node] = torch.where(valid[:, node], drawn, q_row.argmax(-1))
            taken.setdefault(parents[node], []).append(node)
    made = DraftTree.from_shape(
        shape,
        tokens,
        sampling=law,
        draft_probs=q.to(dtype),
        valid=None if invalid == 0 else valid,
    )
    return made, p.to(dtype)


def one_by_one(tree: DraftTree, law: DraftSampling) -> DraftTree:
    """The same drafts, but the host knows neither their shape nor their law."""
    return DraftTree.build(
        tree.tokens,
        tree.parents.clone(),
        valid=tree.valid,
        sampling=torch.full_like(tree.tokens, int(law), dtype=torch.int8),
        draft_probs=tree.draft_probs,
    )


@pytest.mark.parametrize("invalid", [0.0, 0.25])
@pytest.mark.parametrize("law", [IID, SWOR], ids=lambda law: law.name)
@pytest.mark.parametrize("shape", MORE_SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_all_at_once_is_one_by_one(rule: str, shape: str, law: DraftSampling, invalid: float) -> None:
    tree, p = drafted(MORE_SHAPES[shape], law, seed=3, invalid=invalid)
    other = one_by_one(tree, law)
    assert has_thresholds(tree) and not has_thresholds(other)
    stop_law = RULES[rule].laws(tree, p).stop
    torch.testing.assert_close(stop_law, RULES[rule].laws(other, p).stop, atol=1e-12, rtol=0)
    for node in range(0, tree.width, max(1, tree.width // 8)):
        stop = torch.full_like(tree.tokens[:, 0], node)
        reached = stop_law[:, node] > 1e-12  # what would follow a node that no path ends at is nobody's business
        found, expected = RULES[rule].laws(tree, p).after(stop), RULES[rule].laws(other, p).after(stop)
        torch.testing.assert_close(found[reached], expected[reached], atol=1e-11, rtol=0)


@pytest.mark.parametrize("law", [IID, SWOR], ids=lambda law: law.name)
@pytest.mark.parametrize("rule", RULES)
def test_float32_is_close_to_float64(rule: str, law: DraftSampling) -> None:
    """A thousand tokens and eight siblings: no sum over the vocabulary is a small difference of large numbers."""
    exact_tree, exact_p = drafted(TreeShape.branching(8, 2), law, seed=5, invalid=0.0, vocab=1000)
    tree, p = drafted(TreeShape.branching(8, 2), law, seed=5, invalid=0.0, vocab=1000, dtype=torch.float32)
    exact = RULES[rule].laws(exact_tree, exact_p).stop
    torch.testing.assert_close(RULES[rule].laws(tree, p).stop.double(), exact, atol=2e-6, rtol=0)
    stop = torch.zeros_like(tree.tokens[:, 0])
    exact_next = RULES[rule].laws(exact_tree, exact_p).after(stop)
    found = RULES[rule].laws(tree, p).after(stop).double()
    likely = exact[:, 0] > 1e-3
    assert likely.sum() > 10
    torch.testing.assert_close(found[likely], exact_next[likely], atol=1e-5, rtol=0)


MISTAKES = {
    "q is not smaller for later siblings": (RejectionVerifier(), "_masses_left"),
    "the same in traversal": (TraversalVerifier(), "_masses_left"),
    "all weights are 1 among siblings": (TraversalVerifier(), "_fill"),
}


def mistaken(name: str) -> Callable[..., Any]:
    right = getattr(verifiers.thresholds, name)
    if name == "_masses_left":
        return lambda *args: torch.ones_like(right(*args))
    return lambda *args: right(*args[:-1], torch.ones_like(args[-1]))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_enumeration_rejects(mistake: str) -> None:
    rule, name = MISTAKES[mistake]
    tables = Tables.random(4, 2, seed=1, kinds=("dense",))
    shape = TreeShape.branching(1, 3)
    assert enumerate_outcome(rule, tables, shape, SWOR).tv < EXACT
    with mock.patch(f"verifiers.thresholds.{name}", mistaken(name)):
        assert enumerate_outcome(rule, tables, shape, SWOR).tv > BIASED
