"""Which verifiers take which drafters: a refused pair is told a verifier that fits."""

import itertools
import re

import pytest

import verifiers
from specdec import Drafter, DraftSampling, DraftTree, Exactness, Verifier
from specdec.interfaces import why_unfit
from tests.verifiers.cases import IID, SWOR, TOP
from verifiers import TargetWalkVerifier

COUPLED = DraftSampling.COUPLED
RULES: dict[str, type[Verifier]] = {name: getattr(verifiers, name) for name in verifiers.__all__}


class Drafts(Drafter):
    """A drafter of any kind, which never drafts."""

    max_nodes, max_depth = 4, 2

    def __init__(self, *laws: DraftSampling, form: str = "tree", leaf_probs: bool = False):
        self.laws, self.has_leaf_probs = frozenset(laws), leaf_probs
        self.is_chain, self.is_paths = form == "chain", form in ("chain", "paths")

    def bind(self, target, sizes):
        raise NotImplementedError

    def propose(self, slots: object) -> DraftTree:
        raise NotImplementedError


KINDS = [
    Drafts(*laws, form=form, leaf_probs=leaf_probs)
    for laws, form, leaf_probs in itertools.product(
        [(TOP,), (IID,), (SWOR,), (COUPLED,), (TOP, IID), (TOP, SWOR), (TOP, IID, SWOR, COUPLED)],
        ["chain", "paths", "tree"],
        [False, True],
    )
]


def takes(rule: type[Verifier], drafter: Drafter) -> bool:
    """What a verifier declares, written once more."""
    return (
        all(law in rule.samplings for law in drafter.laws)
        and (drafter.is_chain or not rule.chain_only)
        and (drafter.is_chain or drafter.is_paths or not rule.paths_only)
        and (drafter.has_leaf_probs or not rule.needs_leaf_probs)
    )


def test_a_refusal_names_verifiers_that_accept() -> None:
    for name, rule in RULES.items():
        for drafter in KINDS:
            if takes(rule, drafter):
                rule().check(drafter)
                continue
            with pytest.raises(ValueError, match=rf"{name} .* Drafts .*: use \w+") as refusal:
                rule().check(drafter)
            named = re.findall(r"\w+Verifier\b", str(refusal.value).split(": use ")[1])
            assert named and name not in named
            for other in named:
                assert takes(RULES[other], drafter), f"{other} does not take what {refusal.value}"
                assert RULES[other].exactness is Exactness.EXACT


def test_a_verifiers_own_settings_count() -> None:
    """What an instance declares, not its class, decides; and its class is then no advice."""
    rule = TargetWalkVerifier()
    assert why_unfit(rule, Drafts(IID)) is None
    rule.chain_only = True
    with pytest.raises(ValueError, match="use RejectionVerifier") as told:
        rule.check(Drafts(IID))
    assert "TargetWalkVerifier" not in str(told.value).split(": use ")[1]
