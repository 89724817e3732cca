"""Distances of a lossy rule's first token from the target: closed forms, and zero for exact rules."""

import pytest
import torch

from experiments.tracing.distance import first_token_distances
from specdec.checks.drafts import enumerate_drafts, sample_drafts
from specdec.checks.outcomes import emitted_law
from specdec.checks.tables import Tables
from specdec.interfaces import Verifier
from specdec.tree import TreeShape
from specdec.types import DraftSampling
from verifiers import (
    BlockVerifier,
    FuzzyVerifier,
    LenientVerifier,
    RejectionVerifier,
    TargetWalkVerifier,
    TraversalVerifier,
)

IID, SWOR = DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT
TABLES = Tables.random(5, 2, seed=3)


@pytest.mark.parametrize("rule", [BlockVerifier(), TargetWalkVerifier()])
def test_an_exact_rule_has_none_though_given_one_draft_it_seems_to(rule: Verifier) -> None:
    drafts = sample_drafts(TABLES, TreeShape.chain(2), IID, 4, seed=0)
    for found in first_token_distances(rule, drafts.tree, drafts.target_probs):
        assert found.tv == pytest.approx(0, abs=1e-9)
        assert found.kl == pytest.approx(0, abs=1e-9)
    # The law given one draft is another thing, unless the rule ignores what was drafted.
    given = (emitted_law(rule, drafts.tree, drafts.target_probs) - drafts.target_probs[:, 0]).abs().sum(-1)
    assert (given.max() > 0.1) == (not isinstance(rule, TargetWalkVerifier))


@pytest.mark.parametrize(("rule", "law"), [(RejectionVerifier(), SWOR), (TraversalVerifier(), IID)])
def test_an_exact_rule_has_none_on_average_where_siblings_are_drawn_again(rule: Verifier, law: DraftSampling) -> None:
    drafts = sample_drafts(TABLES, TreeShape.branching(2, 1), law, 40, seed=0)
    found = torch.tensor([each.tv for each in first_token_distances(rule, drafts.tree, drafts.target_probs)])
    # A half's mean of 128 laws, summed over few tokens, is off by less than 0.1; forty contexts share one seed's draws.
    assert abs(found.mean()) < 0.03
    assert all(each.kl is None for each in first_token_distances(rule, drafts.tree, drafts.target_probs))


def test_lenience_in_closed_form() -> None:
    p, q = TABLES.p[0][0], TABLES.q[0][0]  # type: ignore[index]
    accepted = torch.minimum(q, p / 0.5)
    residual = (p - q).clamp(min=0)
    emitted = accepted + (1 - accepted.sum()) * residual / residual.sum()
    drafts = sample_drafts(TABLES, TreeShape.chain(2), IID, 1, seed=0)
    (found,) = first_token_distances(LenientVerifier(lenience=0.5), drafts.tree, drafts.target_probs)
    assert found.tv == pytest.approx(float(0.5 * (emitted - p).abs().sum()), abs=1e-9)
    assert found.tv > 0.05
    assert found.kl == pytest.approx(float((emitted * (emitted / p).log()).sum()), abs=1e-9)


def test_several_sampled_siblings_show_a_lossy_rule() -> None:
    drafts = sample_drafts(TABLES, TreeShape.branching(2, 1), SWOR, 8, seed=0)
    exact = enumerate_drafts(TABLES, TreeShape.branching(2), SWOR)
    rule = FuzzyVerifier(threshold=10.0)  # always trusts q
    emitted = (exact.probability[:, None] * emitted_law(rule, exact.tree, exact.target_probs)).sum(0)
    true = float(0.5 * (emitted - TABLES.p[0][0]).abs().sum())
    found = [each.tv for each in first_token_distances(rule, drafts.tree, drafts.target_probs)]
    assert sum(found) / len(found) == pytest.approx(true, abs=0.05)  # type: ignore[arg-type]
    assert true > 0.2
