"""The cost benchmark's own arithmetic: drafts that rules take, and when a dearer rule pays."""

import pytest
import torch

from experiments.bench.rules import LAWS
from experiments.bench.verifiers import SHAPES, Row, accepted_by, break_even, cases_of, make_case, time_rule
from specdec.exactness.checks import check_drafts
from specdec.types import DraftSampling
from verifiers import BlockVerifier, KSeqVerifier, RejectionVerifier


def test_when_a_dearer_rule_pays() -> None:
    # 1 ms more for 0.1 tokens on top of 1 accepted and one more: 2 tokens in 20 ms are as many as 2.1 in 21 ms.
    assert break_even(0.001, 0.1, 1.0) == pytest.approx(0.020)
    assert pytest.approx(2.1 / 0.021) == 2 / 0.020


@pytest.mark.parametrize(
    ("took", "accepted", "pays"), [(0.002, 1.1, "20.00"), (0.001, 1.1, "always"), (0.002, 1.0, "never")]
)
def test_what_the_table_says(took: float, accepted: float, pays: str) -> None:
    assert Row("block", "exact", 16, 8, 1, "chain", took, accepted, 0.001, 1.0).pays == pays


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("chain", [True, False])
def test_drafts_are_such_as_rules_take(law: DraftSampling, chain: bool) -> None:
    case = make_case(8, 50, 3, chain=chain, law=law)
    tree = case.tree()
    assert tree.width - 1 == 8
    check_drafts(RejectionVerifier(), tree, case.p)
    if law is not DraftSampling.IID and not chain:
        assert (tree.tokens[:, 1] != tree.tokens[:, 2]).all(), "siblings are distinct"


def test_rules_are_timed_on_what_they_take() -> None:
    assert all(shape[0] * shape[1] == nodes for nodes, shape in SHAPES.items())
    assert cases_of(BlockVerifier(), 8) == [(True, DraftSampling.WITHOUT_REPLACEMENT)]
    assert cases_of(KSeqVerifier(), 8) == [(True, DraftSampling.IID), (False, DraftSampling.IID)]
    case = make_case(8, 50, 64, chain=True, law=DraftSampling.IID)
    assert time_rule(BlockVerifier(), case, 1) > 0
    block, rejection = accepted_by([BlockVerifier(), RejectionVerifier()], case, draws=8)
    # Over 512 drafts block verification's advantage is many standard errors.
    assert 0 < rejection < block < 8
    torch.testing.assert_close(case.p.sum(-1), torch.ones(64, 9))
