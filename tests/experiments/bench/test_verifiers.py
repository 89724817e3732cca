"""The benchmarks' own arithmetic: drafts that rules take, when a dearer rule pays."""

import pytest
import torch

from experiments.bench.rules import LAWS
from experiments.bench.verifiers import accepted_by, cases_of, make_case, pays, time_rule
from specdec.checks.drafts import check_drafts
from specdec.types import DraftSampling
from verifiers import BlockVerifier, KSeqVerifier, RejectionVerifier


@pytest.mark.parametrize(
    ("took", "accepted", "least"), [(0.002, 1.1, "20.00"), (0.001, 1.1, "always"), (0.002, 1.0, "never")]
)
def test_when_a_dearer_rule_pays(took: float, accepted: float, least: str) -> None:
    # 1 ms more for 0.1 tokens on top of 1 accepted and one more: 2 tokens in 20 ms are as many as 2.1 in 21 ms.
    row = {"rule": "block", "took": took, "accepted": accepted, "base_took": 0.001, "base_accepted": 1.0}
    assert pays(row) == least


def test_rules_are_timed_on_drafts_that_they_take() -> None:
    for law in LAWS:
        case = make_case(8, 50, 3, chain=False, law=law)
        check_drafts(RejectionVerifier(), case.tree(), case.p)
        if law is not DraftSampling.IID:
            assert (case.tokens[:, 1] != case.tokens[:, 2]).all(), "siblings are distinct"
    assert cases_of(BlockVerifier(), 8) == [(True, DraftSampling.WITHOUT_REPLACEMENT)]
    assert cases_of(KSeqVerifier(), 8) == [(True, DraftSampling.IID), (False, DraftSampling.IID)]
    case = make_case(8, 50, 64, chain=True, law=DraftSampling.IID)
    assert time_rule(BlockVerifier(), case, 1) > 0
    block, rejection = accepted_by([BlockVerifier(), RejectionVerifier()], case, draws=8)
    # Over 512 drafts block verification's advantage is many standard errors.
    assert 0 < rejection < block < 8
    torch.testing.assert_close(case.p.sum(-1), torch.ones(64, 9))
