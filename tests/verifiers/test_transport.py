"""Siblings taken together: exact, optimal at every level, the closed form of two equal to the program; and mistakes."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import verifiers.transport
import verifiers.two_draft
from specdec.checks.drafts import enumerate_drafts
from specdec.checks.outcomes import enumerate_outcome, outcome
from specdec.checks.tables import Tables
from specdec.interfaces import Verifier
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.changed_rule import WalkedRule
from tests.verifiers.cases import BIASED, EXACT, IID, KINDS, SWOR, TOP, complete
from verifiers import (
    KSeqVerifier,
    RejectionVerifier,
    TransportVerifier,
    TwoDraftVerifier,
    WeightedTransportVerifier,
)
from verifiers.transport import optimal_acceptance, try_by_program
from verifiers.two_draft import share_out, try_in_pairs
from verifiers.walk import Family, Tried, TryChildren, leaf_to_root

PAIRS, PROGRAM = WeightedTransportVerifier(), WeightedTransportVerifier(solver="program")
SOLVED = 1e-7
"""What the solver leaves of a constraint, hence of the optimum."""


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


def test_bad_settings_of_weighted_transport() -> None:
    with pytest.raises(ValueError, match="solver='simplex': choose pairs or program"):
        WeightedTransportVerifier(solver="simplex")
    p = torch.full((1, 3, 200), 1 / 200)
    tree = DraftTree.from_shape(TreeShape.branching(2), torch.tensor([[0, 1, 2]]), sampling=SWOR, draft_probs=p)
    with pytest.raises(ValueError, match=r"row 0, node 0: 2 siblings over 200 tokens make 40,000 drafts"):
        PROGRAM.laws(tree, p)
    assert PAIRS.laws(tree, p).stop.sum() == pytest.approx(1)


def forgets_the_weight(solve: TryChildren) -> TryChildren:
    """Begins at every node with weight 1."""
    return lambda family, weight: solve(family, torch.ones_like(weight))


def not_given_failure(solve: TryChildren) -> TryChildren:
    """Takes a child's share for its weight, as if its earlier siblings had not failed before it is tried."""

    def try_children(family: Family, weight: Tensor) -> Tried:
        below, own, law = solve(family, weight)
        failed = torch.nn.functional.pad((1 - below).cumprod(-1)[..., :-1], (1, 0), value=1.0)
        return below * failed, own, law

    return try_children


@pytest.mark.parametrize(
    ("mistake", "solve"),
    [
        (forgets_the_weight, try_in_pairs),
        (forgets_the_weight, try_by_program),
        (not_given_failure, try_in_pairs),  # a vertex of the program hardly ever shares a draft out among its members
    ],
)
def test_enumeration_rejects_other_weights(mistake: Callable[[TryChildren], TryChildren], solve: TryChildren) -> None:
    tables = Tables.random(3, 2, seed=3)
    made = enumerate_drafts(tables, TreeShape.branching(2, 1), IID)
    assert outcome(WalkedRule(leaf_to_root, solve), tables, made).tv < EXACT
    result = outcome(WalkedRule(leaf_to_root, mistake(solve)), tables, made)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9), "not even a law: the mistake is another one"


weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1.0), st.just(0.5), st.just(1e-30)), min_size=7, max_size=7)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(weights, weights, st.sampled_from([1.0, 0.9, 0.5, 1e-6]), st.booleans())
def test_sharing_out_spends_what_there_is(p: list[float], q: list[float], weight: float, alike: bool) -> None:
    """Over all pairs: what arrives at a token and what is left of it are its mass; as much arrives as can.

    With zeros, ties, tiny masses and p nearly q.
    """
    mass, draft = (torch.tensor(row, dtype=torch.float64) + 1e-300 * (sum(row) == 0) for row in (p, q))
    draft = draft / draft.sum()
    mass = draft * (1 + 1e-13 * torch.arange(7)) if alike else mass
    mass = weight * mass / mass.sum()
    first, second = torch.cartesian_prod(torch.arange(7), torch.arange(7)).T
    of_first, of_second, left = share_out(mass.expand(49, 7), draft.expand(49, 7), first, second)
    assert (of_first >= 0).all() and (of_second >= 0).all() and (of_first + of_second <= 1 + 1e-15).all()
    assert (left == left[0]).all() and (left >= 0).all()
    chance = draft[first] * draft[second]
    arrives = torch.zeros(7, dtype=torch.float64)
    arrives.index_add_(0, first, chance * of_first)
    arrives.index_add_(0, second, chance * of_second)
    torch.testing.assert_close(arrives + left[0], mass, atol=1e-14, rtol=0)
    best = min(
        float(mass[[i for i in range(7) if chosen >> i & 1]].sum())
        + 1
        - float(draft[[i for i in range(7) if chosen >> i & 1]].sum()) ** 2
        for chosen in range(2**7)
    )
    assert float(arrives.sum()) == pytest.approx(min(best, float(mass.sum())), abs=1e-13)


def test_it_scales() -> None:
    """20 000 tokens in float32: the optimum to rounding, and neither of the two places is preferred."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20_000, generator=generator)
    p, q = logits.softmax(-1), (logits + torch.randn(20_000, generator=generator)).softmax(-1)
    first, second = torch.multinomial(q, 40, replacement=True, generator=generator).view(2, 20)
    p, q = p.expand(20, -1), q.expand(20, -1)
    of_first, of_second, left = share_out(p, q, first, second)
    bound = float(optimal_acceptance(p[0].double() / p[0].double().sum(), q[0].double() / q[0].double().sum(), 2, IID))
    assert 1 - float(left[0].sum()) == pytest.approx(bound, abs=1e-5)
    swapped = share_out(p, q, second, first)
    different = first != second
    torch.testing.assert_close(of_first[different], swapped[1][different])
    torch.testing.assert_close(of_second[different], swapped[0][different])
    assert 0.2 < float((of_first + of_second).mean()) < 1


def test_two_siblings_by_hand() -> None:
    """p = (.2, .8), q = (.6, .4): token 0 comes twice with .36, more than it may.

    alpha = .2 + 1 - .36 = .84: a pair of two tokens must go to token 1, which gets .48 + .16 = .64 of its .8; of the
    pairs (0, 0) a share of .2 / .36 is accepted; .16 of token 1 is left.
    """
    p = torch.tensor([0.2, 0.8], dtype=torch.float64).expand(4, 3, 2).contiguous()
    q = torch.tensor([0.6, 0.4], dtype=torch.float64).expand(4, 3, 2).contiguous()
    tokens = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]])
    tree = DraftTree.from_shape(TreeShape.branching(2), tokens, sampling=IID, draft_probs=q)
    expected = [[4 / 9, 5 / 9, 0], [0, 0, 1], [0, 1, 0], [0, 1, 0]]
    torch.testing.assert_close(TwoDraftVerifier().laws(tree, p).stop, torch.tensor(expected, dtype=torch.float64))
    left = TwoDraftVerifier().laws(tree, p).after(torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(left, torch.tensor([[0.0, 1.0]] * 4, dtype=torch.float64))


def evenly(mass: Tensor, q: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A coin decides which of two tokens is selected, and the selected one is judged by the optimal law."""
    best_of = original(mass, q, first, first)[0], original(mass, q, second, second)[0]
    same = first == second
    left = original(mass, q, first, second)[2]
    return best_of[0].where(same, best_of[0] / 2), torch.where(same, 0.0, best_of[1] / 2), left


def always_the_later(mass: Tensor, q: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Never hands over: selects the token that is drafted too little."""
    of_first, of_second, left = original(mass, q, first, second)
    ratio = mass / q
    later = ratio.gather(-1, first[..., None]) > ratio.gather(-1, second[..., None])
    total, later = of_first + of_second, later[..., 0] | (first == second)
    return total.where(later, 0.0), total.where(~later, 0.0), left


original = verifiers.two_draft.share_out


@pytest.mark.parametrize("mistake", [evenly, always_the_later], ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize(
    "rule", [TwoDraftVerifier(), WeightedTransportVerifier()], ids=lambda rule: type(rule).__name__
)
def test_enumeration_rejects_another_selection(
    rule: Verifier, mistake: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, shape = Tables.random(4, 2, seed=1), TreeShape.branching(2, 1)
    assert enumerate_outcome(rule, tables, shape, IID).tv < EXACT
    monkeypatch.setattr(verifiers.two_draft, "share_out", mistake)
    result = enumerate_outcome(rule, tables, shape, IID)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9), "not even a law: the mistake is another one"
