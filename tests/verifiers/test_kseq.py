"""k-seq and the target walk: published figures, orders, and mistakes to be caught."""

from typing import Any

import pytest
import torch
from torch import Tensor

import verifiers.kseq
from specdec.checks.drafts import enumerate_drafts
from specdec.checks.outcomes import enumerate_outcome, outcome
from specdec.checks.tables import Tables
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.verifiers.cases import BIASED, DIGITS, EXACT, IID, SWOR, needs_tables
from verifiers import KSeqVerifier, RejectionVerifier, TargetWalkVerifier


@needs_tables
@pytest.mark.parametrize(("k", "rho"), [(1, 1), (2, 1.414397), (3, 1.751615)])
def test_rho(tables: dict[str, Tables], k: int, rho: float) -> None:
    table = tables["L"]
    found = verifiers.kseq._run(table.p[0], table.q[0], torch.tensor([k]), k, table.p[0])[0]
    assert found.item() == pytest.approx(rho, abs=DIGITS)


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


def test_enumeration_rejects_a_rho_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """rho = 1 would accept as often as if p could be spent twice."""
    tables = Tables.random(4, 2, seed=21)
    exact = enumerate_outcome(KSeqVerifier(), tables, TreeShape.branching(2, 2), IID)
    original = verifiers.kseq._run

    def too_small(*args: Any) -> tuple[Tensor, Tensor]:
        rho, left = original(*args)
        return torch.ones_like(rho), left

    monkeypatch.setattr(verifiers.kseq, "_run", too_small)
    biased = enumerate_outcome(KSeqVerifier(), tables, TreeShape.branching(2, 2), IID)
    assert exact.tv < EXACT and biased.tv > BIASED
    assert biased.expected_accepted > exact.expected_accepted


def test_halving_the_interval_finds_the_same_rho(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tables on a CPU are searched in more steps of one place each."""
    tables, shape = Tables.random(4, 2, seed=21), TreeShape.branching(3)
    p, q = tables.p[1], tables.p[1].roll(1, -1)
    three = torch.full((len(p),), 3)
    few = verifiers.kseq._run(p, q, three, 3, p)
    monkeypatch.setattr(verifiers.kseq, "_SMALL", 0)
    halved = verifiers.kseq._run(p, q, three, 3, p)
    for one, other in zip(few, halved, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    assert enumerate_outcome(KSeqVerifier(), tables, shape, IID).tv < EXACT
