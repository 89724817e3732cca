"""Traversal with siblings taken together: what it accepts, beside what is known of it, and mistakes."""

from collections.abc import Callable

import pytest
import torch

from specdec.exactness.drafts import enumerate_drafts
from specdec.exactness.outcomes import enumerate_outcome, outcome
from specdec.exactness.tables import Tables
from specdec.interfaces import Verifier
from specdec.tree import DraftTree, TreeShape
from tests.changed_rule import ChangedRule, emit_p
from tests.verifiers.cases import BIASED, DIGITS, EXACT, IID, SWOR, TOP, complete, expected_in_post_order, needs_tables
from verifiers import (
    BlockVerifier,
    GreedyMultiPathVerifier,
    RejectionVerifier,
    TransportVerifier,
    TwoDraftVerifier,
    WeightedTransportVerifier,
)

PAIRS, PROGRAM = WeightedTransportVerifier(), WeightedTransportVerifier(solver="program")


@needs_tables
@pytest.mark.parametrize("solver", ["pairs", "program"])
def test_a_chain_is_a_block(tables: dict[str, Tables], solver: str) -> None:
    result = enumerate_outcome(WeightedTransportVerifier(solver=solver), tables["A"], TreeShape.chain(4), IID)
    assert result.expected_accepted == pytest.approx(2.136358, abs=DIGITS)
    assert result.tv < EXACT


@needs_tables
@pytest.mark.parametrize(
    ("factors", "traversal", "published", "best"),
    [((2, 2), 1.609099, 1.967910, 1.976554), ((2, 1, 1), 1.970944, 2.334321, 2.475580)],
)
def test_figures_without_replacement(
    tables: dict[str, Tables], factors: tuple[int, ...], traversal: float, published: float, best: float
) -> None:
    """They depend on which optimal plan the solver finds; no rule can exceed the last."""
    accepted = expected_in_post_order(PROGRAM, tables["A"], factors, SWOR)
    assert traversal < accepted < best
    assert accepted == pytest.approx(published, rel=0.03)
    assert expected_in_post_order(PAIRS, tables["A"], factors, SWOR) == pytest.approx(traversal, abs=DIGITS)


@needs_tables
@pytest.mark.parametrize(
    ("factors", "transport", "traversal", "best"),
    [((2, 2), 1.688188, 1.509460, 1.770169), ((2, 1, 1), 1.901789, 1.883621, 2.289600)],
)
def test_figures_of_independent_drafts(
    tables: dict[str, Tables], factors: tuple[int, ...], transport: float, traversal: float, best: float
) -> None:
    """More than level by level, more than one after the other, and at most what any lossless rule accepts."""
    result = enumerate_outcome(PAIRS, tables["A"], TreeShape.branching(*factors), IID)
    level_by_level = enumerate_outcome(TwoDraftVerifier(), tables["A"], TreeShape.branching(*factors), IID)
    assert result.tv < EXACT
    assert level_by_level.expected_accepted == pytest.approx(transport, abs=DIGITS)
    assert max(transport, traversal) < result.expected_accepted < best
    assert expected_in_post_order(PAIRS, tables["A"], factors, IID) == pytest.approx(
        result.expected_accepted, abs=EXACT
    )


@needs_tables
def test_our_figures_of_independent_drafts(tables: dict[str, Tables]) -> None:
    """Nobody has published any: so that a change is seen. Two paths beat the best of two (2.023354)."""
    figures = {(2, 2): 1.741998, (2, 1, 1): 2.120921, (3, 1, 1): 2.162350, (2, 2, 2): 2.532432}
    for factors, figure in figures.items():
        assert expected_in_post_order(PAIRS, tables["A"], factors, IID) == pytest.approx(figure, abs=DIGITS)
    best_of_two = enumerate_outcome(GreedyMultiPathVerifier(), tables["A"], TreeShape.branching(2, 1, 1), IID)
    assert best_of_two.expected_accepted < figures[2, 1, 1]


@pytest.mark.parametrize("seed", [complete(seed, strong=seed == 0) for seed in range(4)])
def test_one_level_is_transport(seed: int) -> None:
    tables, shape = Tables.random(4, 1, seed=seed, kinds=("dense", "zeros")), TreeShape.branching(2)
    for laws, ours, level in (
        (IID, PAIRS, TwoDraftVerifier()),
        (IID, PROGRAM, TransportVerifier()),
        (SWOR, PROGRAM, TransportVerifier()),
        (SWOR, PAIRS, RejectionVerifier()),
        (TOP, PAIRS, RejectionVerifier()),
        (TOP, PROGRAM, RejectionVerifier()),
    ):
        made = enumerate_drafts(tables, shape, laws)
        torch.testing.assert_close(
            ours.laws(made.tree, made.target_probs).stop, level.laws(made.tree, made.target_probs).stop
        )


@pytest.mark.parametrize("seed", [complete(seed, strong=seed == 0) for seed in range(4)])
def test_orders(seed: int) -> None:
    """Two paths: at least the block of one of them, and what one after the other accepts."""
    tables = Tables.random(3, 3, seed=seed)
    shape = TreeShape.branching(2, 1, 1)
    accepted = enumerate_outcome(PAIRS, tables, shape, IID).expected_accepted
    assert accepted > enumerate_outcome(BlockVerifier(), tables, TreeShape.chain(3), IID).expected_accepted - EXACT
    assert accepted > enumerate_outcome(RejectionVerifier(), tables, shape, IID).expected_accepted - EXACT


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="solver='simplex': choose pairs or program"):
        WeightedTransportVerifier(solver="simplex")
    p = torch.full((1, 3, 200), 1 / 200)
    tree = DraftTree.from_shape(TreeShape.branching(2), torch.tensor([[0, 1, 2]]), sampling=SWOR, draft_probs=p)
    with pytest.raises(ValueError, match=r"row 0, node 0: 2 siblings over 200 tokens make 40,000 drafts"):
        PROGRAM.laws(tree, p)
    assert PAIRS.laws(tree, p).stop.sum() == pytest.approx(1)


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes


def no_residual(solver: str) -> Verifier:
    """Emits from p."""
    return ChangedRule(WeightedTransportVerifier(solver=solver), after=emit_p)


class ForgetsTheWeight(WeightedTransportVerifier):
    """Begins at every node with weight 1."""

    def _try_children(self, family, weight):
        return super()._try_children(family, torch.ones_like(weight))


class NotGivenFailure(WeightedTransportVerifier):
    """Takes a child's share for its weight, as if its earlier siblings had not failed before it is tried."""

    def _try_children(self, family, weight):
        below, own, law = super()._try_children(family, weight)
        failed = torch.nn.functional.pad((1 - below).cumprod(-1)[..., :-1], (1, 0), value=1.0)
        return below * failed, own, law


@pytest.mark.parametrize(
    ("rule", "solver"),
    [
        (no_residual, "pairs"),
        (no_residual, "program"),
        (ForgetsTheWeight, "pairs"),
        (ForgetsTheWeight, "program"),
        (NotGivenFailure, "pairs"),  # a vertex of the program hardly ever shares a draft out among its members
    ],
)
def test_enumeration_rejects(rule: Callable[..., Verifier], solver: str) -> None:
    tables = Tables.random(3, 2, seed=3)
    made = enumerate_drafts(tables, TreeShape.branching(2, 1), IID)
    assert outcome(WeightedTransportVerifier(solver=solver), tables, made).tv < EXACT
    result = outcome(rule(solver=solver), tables, made)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9), "not even a law: the mistake is another one"
