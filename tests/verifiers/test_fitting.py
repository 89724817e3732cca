"""Which verifiers take which drafters: a refused pair is told a verifier that fits, the user's own rules included."""

import gc
import itertools
import re

import pytest
from torch import Tensor

import specdec.interfaces
import verifiers
from specdec.interfaces import Drafter, Laws, Verifier, fitting_rules, why_unfit
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness, Noise
from tests.verifiers.cases import IID, SWOR, TOP
from verifiers import (
    BlockVerifier,
    CascadeVerifier,
    GreedyMultiPathVerifier,
    KSeqVerifier,
    RejectionVerifier,
    SharedNoiseVerifier,
    TargetWalkVerifier,
    TypicalVerifier,
)

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


@pytest.mark.parametrize("name", RULES)
def test_a_refusal_names_verifiers_that_accept(name: str) -> None:
    rule = RULES[name]()
    for drafter in KINDS:
        if takes(RULES[name], drafter):
            rule.check(drafter)
            continue
        with pytest.raises(ValueError, match=rf"{name} .* Drafts .*: use \w+") as refusal:
            rule.check(drafter)
        named = re.findall(r"\w+Verifier\b", str(refusal.value).split(": use ")[1])
        assert named and name not in named
        for other in named:
            assert takes(RULES[other], drafter), f"{other} does not take what {refusal.value}"
            assert RULES[other].exactness is Exactness.EXACT
            RULES[other]().check(drafter)


@pytest.mark.parametrize(
    ("rule", "drafter", "words"),
    [
        (
            KSeqVerifier,
            Drafts(SWOR),
            "KSeqVerifier is not made for drafts that are WITHOUT_REPLACEMENT, as Drafts draws them: "
            "use RejectionVerifier or TargetWalkVerifier, or another sampling in the drafter",
        ),
        (
            RejectionVerifier,
            Drafts(COUPLED),
            "RejectionVerifier is not made for drafts that are COUPLED, as Drafts draws them: "
            "use SharedNoiseVerifier or TargetWalkVerifier, or another sampling in the drafter",
        ),
        (
            BlockVerifier,
            Drafts(IID),
            "BlockVerifier takes chains only, and Drafts drafts trees: "
            "use RejectionVerifier or TargetWalkVerifier, or a chain in the drafter",
        ),
        (
            GreedyMultiPathVerifier,
            Drafts(IID),
            "GreedyMultiPathVerifier takes independent paths that share only the root, and Drafts drafts other trees: "
            "use RejectionVerifier or TargetWalkVerifier, or a shape such as (3, 1, 1) in the drafter",
        ),
        (
            CascadeVerifier,
            Drafts(IID),
            "CascadeVerifier reads the draft's probabilities at every node, which Drafts does not have: "
            "use RejectionVerifier or TargetWalkVerifier, or a drafter that has them",
        ),
    ],
)
def test_every_reason_is_one_sentence(rule: type[Verifier], drafter: Drafter, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        rule().check(drafter)


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
        with pytest.raises(ValueError, match="use SharedNoiseVerifier or ABetterRule, or another sampling"):
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
    with pytest.raises(
        ValueError, match=r"TargetWalkVerifier takes chains only, .*: use RejectionVerifier or "
    ) as told:
        rule.check(Drafts(IID))
    assert "TargetWalkVerifier" not in str(told.value).split(": use ")[1]


def test_without_any_rule_at_hand_the_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nobody has imported the package of rules: no name of a verifier that is not there."""
    monkeypatch.setattr(specdec.interfaces, "_concrete_rules", list)
    with pytest.raises(ValueError, match="BlockVerifier takes chains only") as told:
        BlockVerifier().check(Drafts(IID))
    assert str(told.value) == (
        "BlockVerifier takes chains only, and Drafts drafts trees, and no verifier that has been imported takes its "
        "drafts: use a chain in the drafter"
    )
