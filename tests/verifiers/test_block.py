"""Block and traversal verification: published figures, their relation to other rules, and mistakes to be caught."""

import pytest
import torch
from torch import Tensor

import verifiers.post_order
from specdec.exactness.drafts import enumerate_drafts
from specdec.exactness.outcomes import enumerate_outcome
from specdec.exactness.tables import Tables
from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.changed_rule import ChangedRule, emit_p
from tests.verifiers.cases import BIASED, DIGITS, EXACT, IID, SWOR, TOP, complete, expected_in_post_order, needs_tables
from verifiers import BlockVerifier, RejectionVerifier, TraversalVerifier


@needs_tables
@pytest.mark.parametrize(("length", "figure"), [(1, 0.756923), (2, 1.356389), (3, 1.792092), (4, 2.136358)])
def test_figures_of_chains(tables: dict[str, Tables], length: int, figure: float) -> None:
    for rule in (BlockVerifier(), TraversalVerifier()):
        for laws in (IID, SWOR):
            result = enumerate_outcome(rule, tables["A"], TreeShape.chain(length), laws)
            assert result.expected_accepted == pytest.approx(figure, abs=DIGITS)
            assert result.tv < EXACT


@needs_tables
@pytest.mark.parametrize(
    ("factors", "laws", "figure"),
    [
        ((2, 2), IID, 1.509460),
        ((2, 1, 1), IID, 1.883621),
        ((2, 2), SWOR, 1.609099),
        ((2, 1, 1), SWOR, 1.970944),
        complete((3, 1, 1), SWOR, 2.316523, strong=False),  # by recursion below
        ((2, 2), TOP, 0.994120),
        ((2, 1, 1), TOP, 0.952749),
    ],
)
def test_figures_of_trees(
    tables: dict[str, Tables], factors: tuple[int, ...], laws: DraftSampling, figure: float
) -> None:
    result = enumerate_outcome(TraversalVerifier(), tables["A"], TreeShape.branching(*factors), laws)
    assert result.expected_accepted == pytest.approx(figure, abs=DIGITS)
    assert result.tv < EXACT


@needs_tables
@pytest.mark.parametrize(
    ("factors", "laws", "figure"),
    [
        ((2, 2), IID, 1.509460),
        ((2, 1, 1), SWOR, 1.970944),
        ((3, 1, 1), IID, 1.960687),
        ((3, 1, 1), SWOR, 2.316523),
        ((2, 2, 2), IID, 2.109060),
        ((2, 2, 2), SWOR, 2.297642),
    ],
)
def test_figures_of_larger_trees(
    tables: dict[str, Tables], factors: tuple[int, ...], laws: DraftSampling, figure: float
) -> None:
    """By recursion: up to 10^7 drafts."""
    assert expected_in_post_order(TraversalVerifier(), tables["A"], factors, laws) == pytest.approx(figure, abs=DIGITS)


@needs_tables
@pytest.mark.parametrize(("drawn", "declared", "figure"), [(IID, SWOR, 0.035), (SWOR, IID, 0.037)])
def test_figures_of_mistakes(
    tables: dict[str, Tables], drawn: DraftSampling, declared: DraftSampling, figure: float
) -> None:
    """The update of q where there is none, and none where there is one."""
    shape = TreeShape.branching(2, 2)
    # Declared rank by rank, so that siblings are tried one by one, as in ``test_rejection``.
    result = enumerate_outcome(TraversalVerifier(), tables["A"], shape, drawn, declared=[declared] * 2)
    assert result.tv == pytest.approx(figure, abs=5.1e-4)


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


def test_post_order_by_hand() -> None:
    """The chain 0 - 1 - 2 with a second child 3 of node 1, and a second child 4 of the root: 2, 3, 1, 4, 0."""
    tree = DraftTree.from_shape(TreeShape.from_paths([(0,), (1,), (0, 0), (0, 1)]), torch.zeros(1, 5, dtype=torch.long))
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1]]  # level by level: node 2 is the root's second child
    chance = torch.tensor([[1.0, 0.5, 0.25, 0.2, 0.1]], dtype=torch.float64)
    law = verifiers.post_order.law_of_first_success(tree, chance)
    expected = [0.8 * 0.9 * 0.5 * 0.75, 0.8 * 0.9 * 0.5, 0.8 * 0.9 * 0.5 * 0.25, 0.2, 0.8 * 0.1]
    torch.testing.assert_close(law, torch.tensor([expected], dtype=torch.float64))


@pytest.mark.parametrize("laws", [IID, SWOR, TOP], ids=lambda law: law.name)
@pytest.mark.parametrize("seed", [complete(seed, strong=seed == 0) for seed in range(4)])
def test_orders(laws: DraftSampling, seed: int) -> None:
    """Block accepts at least what token by token does, traversal at least what rejection does on trees."""
    tables = Tables.random(3, 3, seed=seed)

    def accepted(rule: RejectionVerifier | BlockVerifier | TraversalVerifier, shape: TreeShape) -> float:
        return enumerate_outcome(rule, tables, shape, laws).expected_accepted

    chain, tree = TreeShape.chain(3), TreeShape.branching(2, 2)
    block = accepted(BlockVerifier(), chain)
    assert block == pytest.approx(accepted(TraversalVerifier(), chain), abs=EXACT)
    assert block > accepted(RejectionVerifier(), chain) - EXACT
    if laws is TOP:
        assert block == pytest.approx(accepted(RejectionVerifier(), chain), abs=EXACT)
    if laws is not IID:  # independent siblings: no such order is known
        assert accepted(TraversalVerifier(), tree) > accepted(RejectionVerifier(), tree) - EXACT
    one = TreeShape.chain(1)
    assert accepted(BlockVerifier(), one) == pytest.approx(accepted(RejectionVerifier(), one), abs=EXACT)


def test_a_block_reaches_every_position_with_its_weight() -> None:
    """The key lemma, over the drafts; and then no lossless rule does better."""
    tables, shape = Tables.random(3, 3, seed=7), TreeShape.chain(3)
    made = enumerate_drafts(tables, shape, IID)
    stop_law = BlockVerifier().laws(made.tree, made.target_probs).stop
    weight = BlockVerifier()._weights(made.tree, made.target_probs)[0]
    for position in range(1, 4):
        reached = (made.probability * stop_law[:, position:].sum(1)).sum()
        torch.testing.assert_close(reached, (made.probability * weight[:, position]).sum())


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
NO_RESIDUAL = ChangedRule(TraversalVerifier(), after=emit_p)


class KeepsTheWeight(TraversalVerifier):
    """Does not update w when a child has failed."""

    def _try_children(self, family, weight):
        below, _, law = super()._try_children(family, weight)
        return below, weight, law


class ForgetsTheWeight(TraversalVerifier):
    """Begins at every node with weight 1, as if the path to it were certain."""

    def _try_children(self, family, weight):
        return super()._try_children(family, torch.ones_like(weight))


@pytest.mark.parametrize(
    ("rule", "factors", "laws"),
    [
        (ChangedRule(BlockVerifier(), stop=stops_at_the_first_failure), (1, 1, 1, 1), IID),
        (UNCAPPED, (1, 1, 1, 1), IID),
        (ChangedRule(BlockVerifier(), after=token_residual), (1, 1, 1, 1), IID),
        (NO_RESIDUAL, (2, 2), SWOR),
        (NO_RESIDUAL, (2, 2), TOP),
        (KeepsTheWeight(), (2, 2), SWOR),
        (ForgetsTheWeight(), (2, 2), SWOR),
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


@pytest.mark.parametrize("shape", [TreeShape.branching(2, 2), TreeShape.branching(3, 1)], ids=repr)
def test_the_bound_for_accelerators_changes_nothing(shape: TreeShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where looking would synchronize, rows are filled up with other nodes."""
    tables = Tables.random(3, 2, seed=1)
    made = enumerate_drafts(tables, shape, SWOR)
    expected = TraversalVerifier().laws(made.tree, made.target_probs).stop
    monkeypatch.setattr(
        verifiers.post_order, "_most_parents", lambda tree, here, depth: 1 if depth == 0 else (tree.width - depth) // 2
    )
    assert torch.equal(TraversalVerifier().laws(made.tree, made.target_probs).stop, expected)
