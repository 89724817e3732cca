"""Speculative cascades: exact with respect to the stated mixture, by enumeration."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from specdec.checks.drafts import Samplings, check_drafts, enumerate_drafts
from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.tables import Tables
from specdec.interfaces import Verifier
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.verifiers.cascade_mutants import accepts_towards_the_target, residual_of_the_target, target_after_leaves
from tests.verifiers.cases import BIASED, EXACT, IID, KINDS, SHAPES, SWOR, complete, drafts, needs_tables
from verifiers import CascadeVerifier, RejectionVerifier
from verifiers.cascade import DEFERRALS

SOME = dict.fromkeys(DEFERRALS, 0.3)
NONE = {"chow": -0.1, "diff": -1.1, "opt": -1e9, "token_v1": -1.1, "token_v2": -1.1, "token_v3": -0.1}
ALL = {"chow": 1.0, "diff": 1.0, "opt": 1e9, "token_v1": 1.0, "token_v2": 1.0, "token_v3": 1.0}


# ---------------------------------------------------------------------------------------------------------------------
# Over tables


@pytest.mark.parametrize("deferral", DEFERRALS)
@pytest.mark.parametrize(
    ("shape", "kinds", "laws"),
    [
        complete(shape, kinds, laws, strong=shape == "2x2" and kinds in ("dense", "every kind"))
        for shape in SHAPES
        for kinds in KINDS
        for laws in (IID, SWOR, (IID, SWOR, SWOR))
        if not SHAPES[shape].is_chain or isinstance(laws, DraftSampling)  # a chain has no siblings that could mix laws
    ],
)
def test_the_output_law_is_the_mixture(deferral: str, shape: str, kinds: str, laws: Samplings) -> None:
    rule, tree = CascadeVerifier(deferral=deferral, alpha=SOME[deferral]), SHAPES[shape]
    tables = Tables.random(3 if tree.num_nodes > 3 else 4, tree.max_depth, seed=len(shape), kinds=KINDS[kinds])
    result = enumerate_outcome(rule, tables, tree, laws)
    assert result.tv < EXACT
    if kinds == "dense":
        assert result.target_tv > BIASED


@needs_tables
def test_published_distance(tables: dict[str, Tables]) -> None:
    """.488 from the target and 7e-17 from its own law, published without the rule; these settings give it."""
    rule = CascadeVerifier(deferral="diff", alpha=0.05)
    result = enumerate_outcome(rule, tables["A"], TreeShape.chain(4), IID)
    assert result.target_tv == pytest.approx(0.488, abs=5e-4)
    assert result.tv < EXACT


P = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
Q = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)  # total variation .4


@pytest.mark.parametrize(
    ("deferral", "alpha", "expected"),
    [
        ("chow", 0.59, P),  # .4 < .41
        ("chow", 0.61, Q),  # .4 > .39
        ("diff", 0.09, P),  # .4 < .41
        ("diff", 0.11, Q),
        ("opt", 0.24, P),  # .4 < .5 - .096
        ("opt", 0.26, Q),  # .4 > .5 - .104
        ("token_v1", 0.15, [0.3, 0.58, 0.12, 0.0]),  # q of token 1 only is above .35; deferred mass .6
        ("token_v2", 0.25, [0.35, 0.55, 0.1, 0.0]),  # p of tokens 0 and 1 is above .25; deferred mass .5
        ("token_v3", 0.5, [0.35, 0.55, 0.1, 0.0]),  # the same
        ("token_v2", 0.35, [0.2, 0.46, 0.34, 0.0]),  # token 2, too; deferred mass .2
    ],
)
def test_rules_by_hand(deferral: str, alpha: float, expected: Tensor | list[float]) -> None:
    law = CascadeVerifier(deferral=deferral, alpha=alpha).stated_law(P, Q)
    torch.testing.assert_close(law, torch.as_tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("deferral", DEFERRALS)
def test_keeping_nothing_is_rejection_sampling(deferral: str) -> None:
    tables = Tables.random(4, 2, seed=1, kinds=("dense", "zeros", "disjoint"))
    mine = enumerate_outcome(CascadeVerifier(deferral=deferral, alpha=NONE[deferral]), tables, SHAPES["2x2"], SWOR)
    exact = enumerate_outcome(RejectionVerifier(), tables, SHAPES["2x2"], SWOR)
    assert mine.target_tv < EXACT
    assert mine.expected_accepted == pytest.approx(exact.expected_accepted, abs=EXACT)


@pytest.mark.parametrize("deferral", DEFERRALS)
def test_keeping_everything_is_the_drafter_alone(deferral: str) -> None:
    tables = Tables.random(4, 2, seed=1, kinds=("dense", "zeros", "disjoint"))
    result = enumerate_outcome(CascadeVerifier(deferral=deferral, alpha=ALL[deferral]), tables, TreeShape.chain(2), IID)
    assert tables.q is not None
    drafter = Tables(tables.q, tables.q).joint(3)
    assert float((result.joint - drafter).abs().sum()) < EXACT
    assert result.expected_accepted == pytest.approx(2, abs=EXACT)


def test_a_rule_of_ones_own() -> None:
    def rare(p: Tensor, q: Tensor, distance: Tensor, alpha: float) -> Tensor:
        return p < alpha

    rule = CascadeVerifier(deferral=rare, alpha=0.25)
    torch.testing.assert_close(rule.stated_law(P, Q), torch.tensor([0.25, 0.15, 0.4, 0.2], dtype=torch.float64))
    assert enumerate_outcome(rule, Tables.random(4, 2, seed=1), SHAPES["2x2"], SWOR).tv < EXACT


MUTANTS = [target_after_leaves, residual_of_the_target, accepts_towards_the_target]


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("deferral", ["diff", "token_v3"])
def test_enumeration_rejects(mutant: Callable[..., Verifier], deferral: str) -> None:
    tables = Tables.random(4, 2, seed=3)
    result = enumerate_outcome(mutant(deferral=deferral, alpha=0.2), tables, SHAPES["2x2"], SWOR)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9)


def test_both_laws_are_laws_in_float32() -> None:
    rules = [CascadeVerifier(deferral=name, alpha=alpha) for name, alpha in SOME.items()]

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(drafts(torch.float32))
    def check(case: tuple[DraftTree, Tensor]) -> None:
        tree, p = case
        if tree.draft_probs is None:
            return
        tree = replace(tree, law=torch.where(tree.law == 0, int(IID), tree.law.long()).to(torch.int8))
        for rule in rules:
            stop_law = rule.laws(tree, p).stop
            assert stop_law.dtype == torch.float32 and (stop_law >= 0).all()
            assert (stop_law[~tree.valid] == 0).all()
            assert (stop_law.sum(1) - 1).abs().max() < 1e-5
            for node in range(tree.width):
                next_law = rule.laws(tree, p).after(torch.full_like(tree.tokens[:, 0], node))
                assert (next_law >= 0).all() and (next_law.sum(1) - 1).abs().max() < 1e-5
                assert tree.draft_probs is not None
                neither = (p[:, node] == 0) & (tree.draft_probs[:, node] == 0)
                assert (next_law[neither] == 0).all(), "a token that both models exclude"

    check()


def test_a_row_without_q_is_decoded_plainly() -> None:
    """Beside one that is not."""
    p, q = torch.rand(2, 2, 5).softmax(-1), torch.rand(2, 2, 5).softmax(-1)
    q[0] = 0
    valid = torch.tensor([[True, False], [True, True]])
    tree = DraftTree.from_shape(
        TreeShape.chain(1), torch.tensor([[3, 0], [3, 1]]), valid=valid, sampling=IID, draft_probs=q
    )
    rule = CascadeVerifier(deferral="chow", alpha=1.0)
    assert torch.equal(rule.laws(tree, p).stop[0], torch.tensor([1.0, 0.0]))
    assert torch.equal(rule.laws(tree, p).after(torch.zeros(2, dtype=torch.long))[0], p[0, 0])
    torch.testing.assert_close(rule.laws(tree, p).after(torch.tensor([0, 1]))[1], q[1, 1])


# ---------------------------------------------------------------------------------------------------------------------
# What it says and refuses


def test_drafts_without_q_at_the_leaves_are_refused() -> None:
    tables = Tables.random(3, 1, seed=0)
    made = enumerate_drafts(tables, TreeShape.chain(1), IID)
    with pytest.raises(ValueError, match="row 0, node 1: q after it has an entry that is not finite"):
        check_drafts(CascadeVerifier(), made.tree, made.target_probs)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CascadeVerifier(deferral="opf"), "deferral='opf': choose chow, diff, opt"),
        (lambda: CascadeVerifier(alpha=float("nan")), "alpha=nan: give a number"),
    ],
)
def test_bad_settings(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
