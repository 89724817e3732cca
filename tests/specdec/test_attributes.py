"""A drafter or a rule that lacks something is refused in one sentence when the engine is built."""

import pytest

from drafters import NGramDrafter
from specdec.attributes import missing_methods
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Verifier, fitting_rules
from specdec.target.target import Target
from specdec.types import DraftSampling, Exactness
from tests.honest import Honest
from tests.models import tiny_model
from verifiers import LenientVerifier, RejectionVerifier


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=12, layers=2))


class Methods(Drafter):
    def bind(self, target, sizes): ...


class NoLaws(Methods):
    max_nodes = max_depth = 3
    is_chain = True


class Forgetful(NGramDrafter):
    """Its constructor leaves out its parent's."""

    def __init__(self):
        self.mine = 1


def refusal(target: Target, drafter: Drafter, verifier: Verifier | None = None) -> str:
    name = type(drafter).__name__ if verifier is None else type(verifier).__name__
    with pytest.raises(ValueError, match=f"^{name}") as caught:
        Engine(target, drafter, verifier or RejectionVerifier(), max_length=32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_attributes_are_named_with_what_to_write(target: Target) -> None:
    assert refusal(target, NoLaws()) == (
        "NoLaws has no laws: write into the class, for example, laws = frozenset({DraftSampling.DETERMINISTIC})"
    )
    words = refusal(target, Methods())
    assert words.startswith(
        "Methods has no max_nodes and no max_depth and no laws and no is_chain: write into the class"
    )
    assert "max_nodes = 4; max_depth = 4; laws = frozenset" in words


def test_a_constructor_that_was_not_called_is_named(target: Target) -> None:
    assert refusal(target, Forgetful()) == (
        "Forgetful has no max_nodes and no max_depth and no is_chain, which the constructor of NGramDrafter sets: call "
        "super().__init__(…) in the constructor of Forgetful"
    )


class LenientOfMine(LenientVerifier):
    def __init__(self):
        self.mine = 1


class OwnLaws(LenientOfMine):
    """Needs nothing that its parent's constructor sets."""

    def laws(self, tree, target_probs): ...

    def _try_children(self, family, weight): ...


def test_the_same_for_a_rule_whose_attributes_only_its_methods_read(target: Target) -> None:
    words = refusal(target, Honest(), LenientOfMine())
    assert words.startswith("LenientOfMine has no lenience, which the constructor of LenientVerifier sets")


def test_a_constructor_that_nobody_needs_may_be_left_out(target: Target) -> None:
    class Chain(Honest):
        is_chain = True

    Engine(target, Chain(), OwnLaws(), max_length=32)


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("max_nodes", 2.5, "Changed.max_nodes=2.5: give the largest number of drafted nodes in a row, such as"),
        ("max_nodes", True, "Changed.max_nodes=True: give the largest"),
        ("max_depth", -1, "Changed.max_depth=-1: give the largest depth"),
        ("laws", DraftSampling.IID, "Changed.laws=<DraftSampling.IID: 1>: give a frozenset of DraftSampling"),
        ("laws", frozenset(), "Changed.laws is empty: name the laws by which it draws"),
        ("is_chain", 1, "Changed.is_chain=1: give True if no node ever has two children"),
        (
            "hidden_layers",
            -1,
            r"Changed.hidden_layers=-1: give a tuple of numbers of layers, such as hidden_layers =",
        ),
        ("hidden_layers", (7,), "Changed.hidden_layers names layer 7 and the target has 2 layers: give numbers from 0"),
    ],
)
def test_wrong_attributes_of_a_drafter(target: Target, attribute: str, value: object, words: str) -> None:
    class Changed(Honest): ...

    setattr(Changed, attribute, value)
    with pytest.raises(ValueError, match=words):
        Engine(target, Changed(), RejectionVerifier(), max_length=32)


class OnlyLaws(Verifier):
    samplings = frozenset([DraftSampling.IID])

    def laws(self, tree, target_probs): ...


def test_wrong_attributes_of_a_rule(target: Target) -> None:
    assert refusal(target, Honest(), OnlyLaws()) == (
        "OnlyLaws has no exactness: write into the class, for example, exactness = Exactness.EXACT"
    )
    rule = OnlyLaws()
    rule.exactness = "exact"  # type: ignore[assignment]
    assert "OnlyLaws.exactness='exact': give an Exactness" in refusal(target, Honest(), rule)
    rule.exactness = Exactness.LOSSY
    Engine(target, Honest(), rule, max_length=32)


def test_a_rule_that_lacks_something_is_not_recommended() -> None:
    """And does not keep others from being recommended."""
    assert OnlyLaws not in fitting_rules(Honest())
    assert RejectionVerifier in fitting_rules(Honest())


def test_missing_methods_are_named_with_what_to_write() -> None:
    class Half(Drafter):
        pass

    assert missing_methods(Half) == (
        "Half has no bind: write bind(self, target, sizes), which checks the target and returns a Session with the "
        "state of one engine"
    )
    assert missing_methods(Honest) is None
