"""Block and traversal verification: published figures, their relation to other rules, and mistakes to be caught."""

import pytest
import torch
from torch import Tensor

from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.tables import Tables
from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.changed_rule import ChangedRule, WalkedRule
from tests.verifiers.cases import BIASED, IID, SWOR, needs_tables
from verifiers import BlockVerifier, RejectionVerifier, TraversalVerifier
from verifiers.walk import Family, Tried, leaf_to_root, try_in_turn


def test_a_block_by_hand() -> None:
    """p = (.5, .5) and q = (.25, .75) at every node; the chain drafts 1, then 0.

    w_1 = (.5 / .75) = 2/3 and w_2 = min(1, 2/3 * .5 / .25) = 1: the second token saves the first.
    Had it been 1: w_2 = 2/3 * 2/3 = 4/9 and Z_1 = [2/3 * .5 - .25]+ + [2/3 * .5 - .75]+ = 1/12, h_1 = 1/12 / (5/12).
    """
    p = torch.tensor([0.5, 0.5], dtype=torch.float64).expand(2, 3, 2).contiguous()
    q = torch.tensor([0.25, 0.75], dtype=torch.float64).expand(2, 3, 2).contiguous()
    tree = DraftTree.from_shape(TreeShape.chain(2), torch.tensor([[0, 1, 0], [0, 1, 1]]), sampling=IID, draft_probs=q)
    expected = torch.tensor([[0, 0, 1], [5 / 9 * 4 / 5, 5 / 9 / 5, 4 / 9]], dtype=torch.float64)
    for rule in (BlockVerifier(), TraversalVerifier()):
        torch.testing.assert_close(rule.laws(tree, p).stop, expected)
        after_one = rule.laws(tree, p).after(torch.ones(2, dtype=torch.long))
        torch.testing.assert_close(after_one, torch.tensor([[1.0, 0.0]] * 2, dtype=torch.float64))
        assert torch.equal(rule.laws(tree, p).after(torch.full((2,), 2)), p[:, 2])


def test_rules_on_a_chain_need_no_order_of_columns() -> None:
    """Columns that are padding may stand between the nodes of a chain."""
    p, q = (torch.randn(1, 4, 5, dtype=torch.float64).softmax(-1) for _ in range(2))
    chain = DraftTree.from_shape(
        TreeShape.chain(2), torch.tensor([[0, 1, 2]]), sampling=IID, draft_probs=q[:, :3].contiguous()
    )
    gap = [0, 2, 3]
    wide_p, wide_q = torch.full_like(p, torch.nan), torch.full_like(q, torch.nan)
    wide_p[:, gap], wide_q[:, gap] = p[:, :3], q[:, :3]
    wide = DraftTree.build(
        torch.tensor([[0, 4, 1, 2]]),
        torch.tensor([[-1, 0, 0, 2]]),
        valid=torch.tensor([[True, False, True, True]]),
        sampling=IID,
        draft_probs=wide_q,
    )
    for rule in (BlockVerifier(), TraversalVerifier()):
        narrow, other = rule.laws(chain, p[:, :3]).stop, rule.laws(wide, wide_p).stop
        torch.testing.assert_close(other[:, gap], narrow)
        assert other[0, 1] == 0
        for node in range(3):
            torch.testing.assert_close(
                rule.laws(wide, wide_p).after(torch.tensor([gap[node]])),
                rule.laws(chain, p[:, :3].contiguous()).after(torch.tensor([node])),
            )


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes


def stops_at_the_first_failure(tree: DraftTree, target_probs: Tensor, laws: Laws) -> Tensor:
    """Tries positions from the first on, and ends at the first that is not acceptable."""
    # The chances back from the law, which is that of the last success.
    chance = laws.stop / laws.stop.cumsum(1).clamp(min=1e-300)
    go = torch.cat([torch.ones_like(chance[:, :1]), chance[:, 1:]], 1).cumprod(1)
    return go - torch.nn.functional.pad(go[:, 1:], (0, 1))


def last_uncapped(tree: DraftTree, target_probs: Tensor, laws: Laws) -> Tensor:
    """Accepts the last position by the product of all ratios, as hierarchical speculative decoding was released."""
    parents = tree.parents.clamp(min=0)
    entry = parents * target_probs.shape[2] + tree.tokens
    ratio = target_probs.flatten(1).gather(1, entry) / tree.draft_probs.flatten(1).gather(1, entry)
    last = ratio[:, 1:].prod(1, keepdim=True).clamp(max=1)
    others = laws.stop[:, :-1]
    return torch.cat([others / others.sum(1, keepdim=True).clamp(min=1e-300) * (1 - last), last], 1)


def token_residual(tree: DraftTree, target_probs: Tensor, laws: Laws, stop: Tensor) -> Tensor:
    """Emits from the residual of the token rule, N([p - q]+)."""
    return RejectionVerifier().laws(tree, target_probs).after(stop)


UNCAPPED = ChangedRule(BlockVerifier(), stop=last_uncapped)


def keeps_the_weight(family: Family, weight: Tensor) -> Tried:
    """Does not update w when a child has failed."""
    below, _, law = try_in_turn(family, weight)
    return below, weight, law


def forgets_the_weight(family: Family, weight: Tensor) -> Tried:
    """Begins at every node with weight 1, as if the path to it were certain."""
    return try_in_turn(family, torch.ones_like(weight))


@pytest.mark.parametrize(
    ("rule", "factors", "laws"),
    [
        (ChangedRule(BlockVerifier(), stop=stops_at_the_first_failure), (1, 1, 1, 1), IID),
        (UNCAPPED, (1, 1, 1, 1), IID),
        (ChangedRule(BlockVerifier(), after=token_residual), (1, 1, 1, 1), IID),
        (WalkedRule(leaf_to_root, keeps_the_weight), (2, 2), SWOR),
        (WalkedRule(leaf_to_root, forgets_the_weight), (2, 2), SWOR),
    ],
)
def test_enumeration_rejects(rule: Verifier, factors: tuple[int, ...], laws: DraftSampling) -> None:
    tables = Tables.random(4, len(factors), seed=3)
    # Laws rank by rank, so that siblings are tried one by one, which is what some of the mistakes change.
    result = enumerate_outcome(rule, tables, TreeShape.branching(*factors), [laws] * 4)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9), "not even a law: the mistake is another one"


@needs_tables
def test_the_figure_of_the_uncapped_ratio(tables: dict[str, Tables]) -> None:
    result = enumerate_outcome(UNCAPPED, tables["A"], TreeShape.chain(4), IID)
    assert result.tv == pytest.approx(0.049, abs=5.1e-4)
    assert result.expected_accepted == pytest.approx(2.210, abs=5.1e-4)
