"""Which verifiers take which drafters: a refused pair is told a verifier that fits, the user's own rules included."""

import gc
import itertools
import re

import pytest
from torch import Tensor

import specdec.interfaces
import verifiers
from specdec import Drafter, DraftSampling, DraftTree, Exactness, Laws, Noise, Verifier
from specdec.interfaces import fitting_rules, why_unfit
from tests.verifiers.cases import IID, SWOR, TOP
from verifiers import BlockVerifier, RejectionVerifier, SharedNoiseVerifier, TargetWalkVerifier, TypicalVerifier

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


def test_a_rule_that_nobody_knew_is_found_and_recommended() -> None:
    """Rules that a user has written: one that stands alone, one that varies another rule, and a lossy one."""

    class ABetterRule(Verifier):
        exactness = Exactness.EXACT
        samplings = frozenset(DraftSampling)

        def laws(self, tree: DraftTree, target_probs: Tensor) -> Laws:
            raise NotImplementedError

    class AVariation(TargetWalkVerifier):
        noise = Noise.SHARED

    class ALossyRule(TypicalVerifier):
        pass

    try:
        found = fitting_rules(Drafts(COUPLED))
        assert {ABetterRule, AVariation, ALossyRule, SharedNoiseVerifier} <= set(found)
        assert found[0] is SharedNoiseVerifier, "made for these drafts"
        assert found.index(ABetterRule) < found.index(AVariation) < found.index(ALossyRule)
        with pytest.raises(ValueError, match="use SharedNoiseVerifier or ABetterRule"):
            RejectionVerifier().check(Drafts(COUPLED))
        ABetterRule.chain_only = True
        assert ABetterRule not in fitting_rules(Drafts(COUPLED))
        assert ABetterRule in fitting_rules(Drafts(COUPLED, form="chain"))
    finally:
        del ABetterRule, AVariation, ALossyRule, found
        gc.collect()  # so that no other test is told of them


def test_a_verifiers_own_settings_count() -> None:
    """What an instance declares, not its class, decides; and its class is then no advice."""
    rule = TargetWalkVerifier()
    assert why_unfit(rule, Drafts(IID)) is None
    rule.chain_only = True
    with pytest.raises(ValueError, match="use RejectionVerifier") as told:
        rule.check(Drafts(IID))
    assert "TargetWalkVerifier" not in str(told.value).split(": use ")[1]


def test_without_any_rule_at_hand_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nobody has imported the package of rules: no name of a verifier that is not there."""
    monkeypatch.setattr(specdec.interfaces, "_concrete_rules", list)
    with pytest.raises(ValueError, match="BlockVerifier") as told:
        BlockVerifier().check(Drafts(IID))
    assert re.findall(r"\w+Verifier\b", str(told.value)) == ["BlockVerifier"]
