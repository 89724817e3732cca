"""Rejection sampling: by hand, and its formulas."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor

from specdec.checks.drafts import Samplings
from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.tables import Tables
from specdec.interfaces import Laws
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.changed_rule import ChangedRule
from tests.verifiers.cases import BIASED, EXACT, IID, SWOR, TOP, drafts
from verifiers import RejectionVerifier


def test_repeated_deterministic_siblings_count_once() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).expand(1, 4, 3).contiguous()
    tree = DraftTree.from_shape(TreeShape.branching(3), torch.tensor([[1, 1, 0, 1]]))
    rule = RejectionVerifier()
    expected = torch.tensor([[0.2, 0.3, 0.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(rule.laws(tree, p).stop, expected)
    torch.testing.assert_close(
        rule.laws(tree, p).after(torch.zeros(1, dtype=torch.long)), torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    )
    with_q = replace(tree, draft_probs=torch.full_like(p, torch.nan))
    torch.testing.assert_close(rule.laws(with_q, p).stop, expected)


# By hand: p = (.5, .3, .2), q = (.2, .5, .3), one level, so p_1 = N([p - q]+) is all on token 0.
#   a child 0 is accepted with probability 1, a first child 1 with .3 / .5, a first child 2 with .2 / .3;
#   after a rejection (of 1 or 2) an IID child 0 has min(1, 1 / .2) = 1, and without replacement min(1, 1 / q_1(0)) = 1.
BY_HAND = [
    (IID, [1], [0.4, 0.6], [1.0, 0.0, 0.0]),
    (IID, [0], [0.0, 1.0], None),
    (IID, [2, 1], [1 / 3, 2 / 3, 0.0], [1.0, 0.0, 0.0]),
    (IID, [1, 0], [0.0, 0.6, 0.4], None),
    (IID, [1, 1], [0.4, 0.6, 0.0], [1.0, 0.0, 0.0]),
    (SWOR, [1, 0], [0.0, 0.6, 0.4], None),
    (SWOR, [1, 2], [0.4, 0.6, 0.0], [1.0, 0.0, 0.0]),
    (TOP, [1, 2], [0.5, 0.3, 0.2], [1.0, 0.0, 0.0]),
    (TOP, [1], [0.7, 0.3], [5 / 7, 0.0, 2 / 7]),
    # Token 1 for certain, then q without it, (.4, 0, .6), from what is left of p, (5/7, 0, 2/7):
    # token 2 is accepted with (2/7) / .6 = 10/21 of the .7, and N([p_1 - q_1]+) is all on token 0.
    ((TOP, SWOR), [1, 2], [0.7 * 11 / 21, 0.3, 0.7 * 10 / 21], [1.0, 0.0, 0.0]),
    # The same, but from q itself: (2/7) / .3 = 20/21 of the .7.
    ((TOP, IID), [1, 2], [0.7 * 1 / 21, 0.3, 0.7 * 20 / 21], [1.0, 0.0, 0.0]),
]


@pytest.mark.parametrize(("laws", "tokens", "stop_law", "residual"), BY_HAND)
def test_one_level_by_hand(
    laws: Samplings, tokens: list[int], stop_law: list[float], residual: list[float] | None
) -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).expand(1, len(tokens) + 1, 3).contiguous()
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).expand(1, len(tokens) + 1, 3).contiguous()
    law = [laws] * len(tokens) if isinstance(laws, DraftSampling) else list(laws)
    tree = DraftTree.from_shape(
        TreeShape.branching(len(tokens)),
        torch.tensor([[0, *tokens]]),
        sampling=torch.tensor([[TOP, *law]], dtype=torch.int8),
        draft_probs=q,
    )
    rule = RejectionVerifier()
    torch.testing.assert_close(rule.laws(tree, p).stop, torch.tensor([stop_law], dtype=torch.float64))
    if residual is not None:
        next_law = rule.laws(tree, p).after(torch.zeros(1, dtype=torch.long))
        torch.testing.assert_close(next_law, torch.tensor([residual], dtype=torch.float64))
    # After a leaf p itself, to the last bit.
    assert torch.equal(rule.laws(tree, p).after(torch.ones(1, dtype=torch.long)), p[:, 1])


# ---------------------------------------------------------------------------------------------------------------------
# The formulas, literally


def literal_laws(tree: DraftTree, target_probs: Tensor) -> tuple[list[int], list[list[float]], list[list[list[float]]]]:
    """Rows that can be drawn, and both laws of these, the second of every node, node by node in Python floats."""
    rows, stop_laws, next_laws = [], [], []
    for row in range(len(target_probs)):
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        reach = [1.0] + [0.0] * (len(tokens) - 1)
        stop, residuals, possible = [0.0] * len(tokens), [], True
        for node in range(len(tokens)):
            p = node_p = target_probs[row, node].tolist()
            rejected, earlier = 1.0, set()
            for child in range(len(tokens)):
                if parents[child] != node or not tree.valid[row, child]:
                    continue
                token, law = tokens[child], int(tree.law[row, child])
                if law == TOP:
                    q = [float(other == token) for other in range(len(p))]
                else:
                    q = tree.draft_probs[row, node].tolist()
                    if law == SWOR:
                        q = [0.0 if other in earlier else mass for other, mass in enumerate(q)]
                        q = [mass / sum(q) for mass in q] if sum(q) > 0 else q
                a = min(1.0, p[token] / q[token]) if q[token] > 0 else 0.0
                reach[child] = reach[node] * rejected * a
                rejected *= 1 - a
                left = [max(0.0, mass - drafted) for mass, drafted in zip(p, q, strict=True)]
                p = [mass / sum(left) for mass in left] if sum(left) > 0 else node_p
                earlier.add(token)
                possible &= q[token] > 0
            if tree.valid[row, node]:
                stop[node] = reach[node] * rejected
            residuals.append(p)
        if possible:
            rows.append(row)
            stop_laws.append(stop)
            next_laws.append(residuals)
    return rows, stop_laws, next_laws


@settings(max_examples=100, deadline=None, derandomize=True)
@given(drafts(torch.float64))
def test_the_laws_are_the_formulas(case: tuple[DraftTree, Tensor]) -> None:
    tree, p = case
    rows, *expected = literal_laws(tree, p)
    assume(rows)
    expected_stop, expected_next = (torch.tensor(law, dtype=torch.float64) for law in expected)
    laws = RejectionVerifier().laws(tree, p)
    torch.testing.assert_close(laws.stop[rows], expected_stop, atol=1e-12, rtol=0)
    for node in range(tree.width):
        next_law = laws.after(torch.full_like(tree.tokens[:, 0], node))[rows]
        # Where a path all but never ends, the residual is all rounding: compare what it contributes.
        weight = expected_stop[:, node, None]
        torch.testing.assert_close(weight * next_law, weight * expected_next[:, node], atol=1e-12, rtol=0)


def residual_of_the_parent(tree: DraftTree, target_probs: Tensor, laws: Laws, stop: Tensor) -> Tensor:
    """Takes the residual with the q of the node above."""
    above = tree.parents.clamp(min=0)[..., None].expand_as(target_probs)
    other = replace(tree, draft_probs=tree.draft_probs.gather(1, above))
    return RejectionVerifier().laws(other, target_probs).after(stop)


def acceptance_of_the_root(tree: DraftTree, target_probs: Tensor, laws: Laws) -> Tensor:
    """Forgets the parent: accepts with p and q of the root."""
    return RejectionVerifier().laws(tree, target_probs[:, :1].expand_as(target_probs).contiguous()).stop


@pytest.mark.parametrize(("factors", "law"), [((1, 1, 1, 1), IID), ((2, 2), SWOR)])
def test_enumeration_rejects(factors: tuple[int, ...], law: DraftSampling) -> None:
    tables, shape = Tables.random(4, len(factors), seed=21), TreeShape.branching(*factors)
    assert enumerate_outcome(RejectionVerifier(), tables, shape, law).tv < EXACT
    for mistake in ({"after": residual_of_the_parent}, {"stop": acceptance_of_the_root}):
        if factors == (2, 2) and "stop" in mistake:
            continue
        result = enumerate_outcome(ChangedRule(RejectionVerifier(), **mistake), tables, shape, law)
        assert result.tv > BIASED
        assert result.joint.sum().item() == pytest.approx(1, abs=1e-9), "not even a law: the mistake is another one"
