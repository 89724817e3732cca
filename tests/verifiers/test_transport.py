"""Optimal transport: exact, optimal at every level, and the bound in closed form equal to the program's optimum."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import verifiers.transport
from specdec.exactness.drafts import enumerate_drafts
from specdec.exactness.outcomes import enumerate_outcome, expected_by_levels, outcome
from specdec.exactness.tables import Tables
from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling, Exactness
from tests.changed_rule import ChangedRule, emit_p
from tests.verifiers.cases import BIASED, DIGITS, EXACT, IID, KINDS, SWOR, TOP, complete, needs_tables
from verifiers import KSeqVerifier, RejectionVerifier, TransportVerifier
from verifiers.transport import optimal_acceptance

SOLVED = 1e-7
"""What the solver leaves of a constraint, hence of the optimum."""


@pytest.mark.parametrize("kinds", [complete(kinds, strong=kinds == "every kind") for kinds in KINDS])
@pytest.mark.parametrize(
    "laws",
    [TOP, IID, SWOR, (IID, SWOR, SWOR), (SWOR, IID, SWOR), (TOP, SWOR, SWOR), (SWOR, TOP, TOP), (TOP, IID, IID)],
    ids=str,
)
@pytest.mark.parametrize(
    "factors", [complete(factors, strong=factors == (2, 2)) for factors in ((1, 1), (2, 2), (3, 1))]
)
def test_the_output_law_is_the_targets(
    factors: tuple[int, ...], laws: DraftSampling | tuple[DraftSampling, ...], kinds: str
) -> None:
    tables = Tables.random(3, 2, seed=len(kinds), kinds=KINDS[kinds])
    assert enumerate_outcome(TransportVerifier(), tables, TreeShape.branching(*factors), laws).tv < EXACT


def test_one_token_leaves_nothing_to_go_wrong() -> None:
    result = enumerate_outcome(TransportVerifier(), Tables.random(1, 2, seed=0), TreeShape.branching(2, 1), IID)
    assert result.tv < EXACT and result.expected_accepted == pytest.approx(2)


def test_trees_whose_shape_depends_on_the_draft_are_exact() -> None:
    tables, shape = Tables.random(3, 2, seed=3, kinds=("dense", "zeros")), TreeShape.branching(2, 2)
    made = enumerate_drafts(tables, shape, SWOR, grows=lambda node, prefix: (node < 3) | ((prefix + node) % 3 > 0))
    assert not made.tree.valid.all()
    assert outcome(TransportVerifier(), tables, made).tv < EXACT


@pytest.mark.parametrize("law", [IID, SWOR])
@pytest.mark.parametrize("children", [1, 2, 3])
@pytest.mark.parametrize("kinds", [complete(kinds, strong=kinds in ("dense", "every kind")) for kinds in KINDS])
def test_the_bound_is_reached_and_is_that_of_all_sets(law: DraftSampling, children: int, kinds: str) -> None:
    tables = Tables.random(5, 1, seed=children, kinds=KINDS[kinds])
    shape = TreeShape.branching(children)
    made = enumerate_drafts(tables, shape, law)
    accepted = outcome(TransportVerifier(), tables, made).expected_accepted
    p, q = tables.p[0][0], tables.q[0][0]
    bound = float(optimal_acceptance(p, q, children, law))
    assert accepted == pytest.approx(bound, abs=SOLVED)
    # The minimum over all sets of tokens, from the drafts themselves.
    least = 0.0
    for size in range(1, 6):
        for chosen in itertools.combinations(range(5), size):
            inside = (torch.isin(made.tree.tokens, torch.tensor(chosen)) | ~made.tree.valid)[:, 1:].all(1)
            least = min(least, float(p[list(chosen)].sum() - made.probability[inside].sum()))
    assert bound == pytest.approx(1 + least, abs=EXACT)
    for rule in (RejectionVerifier(), KSeqVerifier()):
        if law in rule.samplings:
            assert outcome(rule, tables, made).expected_accepted < bound + EXACT


def test_the_bound_takes_batches() -> None:
    p, q = (torch.rand(2, 3, 6, dtype=torch.float64).softmax(-1) for _ in range(2))
    for law in (IID, SWOR):
        bound = optimal_acceptance(p, q, 2, law)
        assert bound.shape == (2, 3)
        assert bound[1, 2] == optimal_acceptance(p[1, 2], q[1, 2], 2, law)
    with pytest.raises(ValueError, match="2 DETERMINISTIC siblings: the bound is for"):
        optimal_acceptance(p, q, 2, TOP)


@needs_tables
@pytest.mark.parametrize(
    ("law", "figures"), [(IID, (0.698887, 0.889817, 0.985087)), (SWOR, (0.698887, 0.908264, 1.000000))]
)
def test_figures_of_one_level(tables: dict[str, Tables], law: DraftSampling, figures: tuple[float, ...]) -> None:
    for children, figure in enumerate(figures, start=1):
        result = enumerate_outcome(TransportVerifier(), tables["L"], TreeShape.branching(children), law)
        assert result.expected_accepted == pytest.approx(figure, abs=DIGITS) and result.tv < EXACT
        bound = optimal_acceptance(tables["L"].p[0][0], tables["L"].q[0][0], children, law)
        assert float(bound) == pytest.approx(figure, abs=DIGITS)


@needs_tables
@pytest.mark.parametrize(
    ("factors", "iid", "swor"),
    [
        ((2, 2), 1.687749, 1.957777),
        ((2, 1, 1), 1.899908, 2.123598),
        complete((3, 1, 1), 2.129354, 2.148478, strong=False),
        complete((2, 2, 2), 2.386174, 2.884185, strong=False),
    ],
)
def test_figures_of_fixture_a(tables: dict[str, Tables], factors: tuple[int, ...], iid: float, swor: float) -> None:
    """Below the first level they depend on which optimal plan the solver finds: to 0.2 %."""
    for law, figure in ((IID, iid), (SWOR, swor)):
        assert expected_by_levels(TransportVerifier(), tables["A"], factors, law) == pytest.approx(figure, rel=2e-3)


def test_temperature_zero_is_greedy_matching() -> None:
    p = torch.zeros(1, 3, 4)
    p[0, :, 2] = 1
    tree = DraftTree.from_shape(TreeShape.branching(2), torch.tensor([[0, 1, 2]]))
    assert TransportVerifier().laws(tree, p).stop.tolist() == [[0, 0, 1]]
    assert torch.equal(TransportVerifier().laws(tree, p).after(torch.tensor([2])), p[:, 2])
    other = replace(tree, tokens=torch.tensor([[0, 1, 3]]))
    assert TransportVerifier().laws(other, p).stop.tolist() == [[1, 0, 0]]
    assert torch.equal(TransportVerifier().laws(other, p).after(torch.tensor([0])), p[:, 0])


def test_what_it_refuses() -> None:
    assert TransportVerifier.exactness is Exactness.EXACT
    p = torch.full((1, 3, 200), 1 / 200)
    tree = DraftTree.from_shape(TreeShape.branching(2), torch.tensor([[0, 1, 2]]), sampling=IID, draft_probs=p)
    wanted = r"row 0, node 0: 2 siblings over 200 tokens make 40,000 drafts, .* draft at most 1"
    with pytest.raises(ValueError, match=wanted):
        TransportVerifier().laws(tree, p)


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes


def residual_of_rejection(tree: DraftTree, target_probs: Tensor, laws: Laws, stop: Tensor) -> Tensor:
    """Emits from what the rule leaves that tries one sibling after the other and updates p."""
    return RejectionVerifier().laws(tree, target_probs).after(stop)


@pytest.mark.parametrize(
    ("rule", "laws", "declared"),
    [
        (ChangedRule(TransportVerifier(), after=emit_p), SWOR, SWOR),
        (ChangedRule(TransportVerifier(), after=residual_of_rejection), SWOR, SWOR),
        (TransportVerifier(), SWOR, IID),
    ],
)
def test_enumeration_rejects(rule: Verifier, laws: DraftSampling, declared: DraftSampling) -> None:
    tables = Tables.random(4, 2, seed=5)
    result = enumerate_outcome(rule, tables, TreeShape.branching(2, 2), laws, declared=declared)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9), "not even a law: the mistake is another one"


def test_enumeration_rejects_a_plan_that_spends_p_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def generous(self: object, drawn: tuple[int, ...]) -> np.ndarray:
        accepted = original(self, drawn)
        return accepted / max(accepted.sum(), 1e-300)

    monkeypatch.setattr(verifiers.transport, "_try_one", verifiers.transport._try_one.__wrapped__)  # nothing kept
    original = verifiers.transport._Plan.given
    monkeypatch.setattr(verifiers.transport._Plan, "given", generous)
    assert (
        enumerate_outcome(TransportVerifier(), Tables.random(4, 2, seed=3), TreeShape.branching(2, 2), SWOR).tv > BIASED
    )
