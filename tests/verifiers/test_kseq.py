"""k-seq and the target walk: published figures, orders, and mistakes to be caught."""

import pytest
import torch
from torch import Tensor

import verifiers.kseq
from specdec.exactness.drafts import enumerate_drafts
from specdec.exactness.outcomes import enumerate_outcome, expected_by_levels, outcome
from specdec.exactness.tables import Tables
from specdec.interfaces import Laws
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.changed_rule import ChangedRule, emit_p
from tests.verifiers.cases import BIASED, DIGITS, EXACT, IID, SWOR, TOP, complete, needs_tables
from verifiers import KSeqVerifier, RejectionVerifier, TargetWalkVerifier


@needs_tables
@pytest.mark.parametrize(
    ("factors", "figure"),
    [
        ((1, 1, 1, 1), 1.818869),
        ((2, 2), 1.508989),
        ((2, 1, 1), 1.747220),
        ((3, 1, 1), 1.867770),
        ((2, 2, 2), 2.064351),
    ],
)
def test_figures_of_kseq(tables: dict[str, Tables], factors: tuple[int, ...], figure: float) -> None:
    assert expected_by_levels(KSeqVerifier(), tables["A"], factors, IID) == pytest.approx(figure, abs=DIGITS)


@needs_tables
@pytest.mark.parametrize(("k", "figure", "rho"), [(1, 0.698887, 1), (2, 0.828275, 1.414397), (3, 0.874394, 1.751615)])
def test_figures_of_one_level(tables: dict[str, Tables], k: int, figure: float, rho: float) -> None:
    table = tables["L"]
    result = enumerate_outcome(KSeqVerifier(), table, TreeShape.branching(k), IID)
    assert result.expected_accepted == pytest.approx(figure, abs=DIGITS) and result.tv < EXACT
    law = torch.full((1, k), IID, dtype=torch.int8)
    assert verifiers.kseq._run(table.p[0], table.q[0], law, table.p[0])[0].item() == pytest.approx(rho, abs=DIGITS)


@needs_tables
@pytest.mark.parametrize(
    ("factors", "laws", "figure"),
    [
        ((1, 1, 1, 1), TOP, 0.719437),
        ((2, 2), TOP, 0.994120),
        ((2, 1, 1), TOP, 0.952749),
        ((3, 1, 1), TOP, 1.541411),
        ((2, 2, 2), TOP, 1.190922),
        ((1, 1, 1, 1), IID, 0.443959),
        ((2, 2), SWOR, 0.922251),
        ((2, 1, 1), SWOR, 0.819233),
    ],
)
def test_figures_of_the_target_walk(
    tables: dict[str, Tables], factors: tuple[int, ...], laws: DraftSampling, figure: float
) -> None:
    result = enumerate_outcome(TargetWalkVerifier(), tables["A"], TreeShape.branching(*factors), laws)
    assert result.expected_accepted == pytest.approx(figure, abs=DIGITS)
    assert result.tv < EXACT


@pytest.mark.parametrize("seed", [complete(seed, strong=seed == 0) for seed in range(5)])
def test_kseq_accepts_at_least_what_rejection_does(seed: int) -> None:
    tables = Tables.random(4, 2, seed=seed, kinds=("dense", "zeros"))
    for factors in ((2, 2), (3, 2)):
        kseq, rejection = (
            expected_by_levels(rule(), tables, factors, IID) for rule in (KSeqVerifier, RejectionVerifier)
        )
        assert kseq > rejection - EXACT
    chain = [
        enumerate_outcome(rule(), tables, TreeShape.chain(2), IID).expected_accepted
        for rule in (KSeqVerifier, RejectionVerifier)
    ]
    assert chain[0] == pytest.approx(chain[1], abs=EXACT)


def test_the_target_walk_takes_any_draft_at_all() -> None:
    """Sorted after they were drawn, which biases every rule that looks at q; and declared to be drawn coupled."""
    tables = Tables.random(4, 1, seed=21)
    made = enumerate_drafts(tables, TreeShape.branching(2), SWOR, declared=DraftSampling.COUPLED)
    children = made.tree.tokens[:, 1:]
    children = children.gather(1, tables.q[0][0][children].argsort(dim=1, descending=True))
    tokens = torch.cat([made.tree.tokens[:, :1], children], 1)
    p = torch.stack([tables.p[0].expand(len(tokens), -1), *(tables.p[1][children[:, i]] for i in range(2))], 1)
    prefixes = torch.cat([torch.zeros_like(tokens[:, :1]), children], 1)
    law = made.tree.law
    for rule, law, biased in (
        (TargetWalkVerifier(), made.tree.law, False),
        (RejectionVerifier(), torch.where(made.tree.law > 0, SWOR, 0).to(torch.int8), True),
    ):
        tree = DraftTree.from_shape(TreeShape.branching(2), tokens, sampling=law, draft_probs=made.tree.draft_probs)
        drafts = type(made)(tree, prefixes, made.probability, p)
        tv = outcome(rule, tables, drafts).tv
        assert tv > BIASED if biased else tv < EXACT


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes


def residual_of_rejection(tree: DraftTree, target_probs: Tensor, laws: Laws, stop: Tensor) -> Tensor:
    """Emits from what the rule leaves that tries one sibling after the other and updates p."""
    return RejectionVerifier().laws(tree, target_probs).after(stop)


@pytest.mark.parametrize(
    ("rule", "laws", "declared"),
    [
        (ChangedRule(KSeqVerifier(), after=residual_of_rejection), IID, IID),
        (ChangedRule(KSeqVerifier(), after=emit_p), IID, IID),
        (KSeqVerifier(), SWOR, IID),
        (ChangedRule(TargetWalkVerifier(), after=emit_p), SWOR, SWOR),
        (ChangedRule(TargetWalkVerifier(), after=emit_p), TOP, TOP),
    ],
)
def test_enumeration_rejects(
    rule: KSeqVerifier | TargetWalkVerifier, laws: DraftSampling, declared: DraftSampling
) -> None:
    tables = Tables.random(4, 2, seed=21)
    result = enumerate_outcome(rule, tables, TreeShape.branching(2, 2), laws, declared=declared)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9), "not even a law: the mistake is another one"


def test_enumeration_rejects_a_rho_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """rho = 1 would accept as often as if p could be spent twice."""
    tables = Tables.random(4, 2, seed=21)
    exact = enumerate_outcome(KSeqVerifier(), tables, TreeShape.branching(2, 2), IID)
    original = verifiers.kseq._run

    def too_small(p: Tensor, q: Tensor, laws: Tensor, fallback: Tensor) -> tuple[Tensor, Tensor]:
        rho, left = original(p, q, laws, fallback)
        return torch.ones_like(rho), left

    monkeypatch.setattr(verifiers.kseq, "_run", too_small)
    biased = enumerate_outcome(KSeqVerifier(), tables, TreeShape.branching(2, 2), IID)
    assert exact.tv < EXACT and biased.tv > BIASED
    assert biased.expected_accepted > exact.expected_accepted


def test_halving_the_interval_finds_the_same_rho(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tables on a CPU are searched in more steps of one place each."""
    tables, shape = Tables.random(4, 2, seed=21), TreeShape.branching(3, 2)
    p, q = tables.p[1], tables.p[1].roll(1, -1)
    law = torch.full((len(p), 3), IID, dtype=torch.int8)
    few = verifiers.kseq._run(p, q, law, p)
    monkeypatch.setattr(verifiers.kseq, "_SMALL", 0)
    halved = verifiers.kseq._run(p, q, law, p)
    for one, other in zip(few, halved, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    assert enumerate_outcome(KSeqVerifier(), tables, shape, IID).tv < EXACT
