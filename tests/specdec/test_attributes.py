"""A drafter or a rule that lacks something is refused in one sentence when the engine is built."""

from typing import Any

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

    def __init__(self): ...


class LenientOfMine(LenientVerifier):
    def __init__(self): ...


class OwnLaws(LenientOfMine):
    """Needs nothing that its parent's constructor sets."""

    def laws(self, tree, target_probs): ...

    def _try_children(self, family, weight): ...


class OnlyLaws(Verifier):
    samplings = frozenset([DraftSampling.IID])

    def laws(self, tree, target_probs): ...


def changed(kind: type, **attributes: object) -> Any:
    """An instance of a class with other attributes."""
    return type("Changed", (kind,), attributes)()


REFUSED = [
    (NoLaws(), "NoLaws has no laws: .*laws = frozenset"),
    (Methods(), "Methods has no max_nodes and no max_depth and no laws and no is_chain: .*max_nodes = 4; max_depth"),
    (Forgetful(), "Forgetful has no max_nodes .*constructor of NGramDrafter .*super"),
    (LenientOfMine(), "LenientOfMine has no lenience, .*constructor of LenientVerifier"),
    (OnlyLaws(), "OnlyLaws has no exactness: .*exactness = Exactness.EXACT"),
    (changed(OnlyLaws, exactness="exact"), "Changed.exactness='exact': "),
    (changed(Honest, max_nodes=2.5), "Changed.max_nodes=2.5: "),
    (changed(Honest, max_nodes=True), "Changed.max_nodes=True: "),
    (changed(Honest, max_depth=-1), "Changed.max_depth=-1: "),
    (changed(Honest, laws=DraftSampling.IID), "Changed.laws=<DraftSampling.IID: 1>: "),
    (changed(Honest, laws=frozenset()), "Changed.laws is empty"),
    (changed(Honest, is_chain=1), "Changed.is_chain=1: "),
    (changed(Honest, hidden_layers=-1), "Changed.hidden_layers=-1: "),
    (changed(Honest, hidden_layers=(7,)), "Changed.hidden_layers names layer 7 "),
]


@pytest.mark.parametrize(("component", "words"), REFUSED, ids=range(len(REFUSED)))
def test_missing_and_wrong_attributes_are_named(target: Target, component: Any, words: str) -> None:
    pair = (component, RejectionVerifier()) if isinstance(component, Drafter) else (Honest(), component)
    with pytest.raises(ValueError, match=f"^{words}") as caught:
        Engine(target, *pair, max_length=32)
    assert "\n" not in str(caught.value)


def test_what_nobody_needs_may_be_left_out(target: Target) -> None:
    Engine(target, changed(Honest, is_chain=True), OwnLaws(), max_length=32)
    Engine(target, Honest(), changed(OnlyLaws, exactness=Exactness.LOSSY), max_length=32)


def test_a_rule_that_lacks_something_is_not_recommended() -> None:
    """And does not keep others from being recommended."""
    assert OnlyLaws not in fitting_rules(Honest())
    assert RejectionVerifier in fitting_rules(Honest())


def test_missing_methods_are_named_with_what_to_write() -> None:
    class Half(Drafter):
        pass

    assert str(missing_methods(Half)).startswith("Half has no bind: write bind(self, target, sizes)")
    assert missing_methods(Honest) is None
