"""Siblings, and branches, of different laws: a looked-up branch beside a model's, the top k beside a draw."""

import pytest

from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.tables import Tables
from specdec.interfaces import Verifier
from specdec.tree import TreeShape
from specdec.types import DraftSampling
from tests.verifiers.cases import (
    BIASED,
    EXACT,
    IID,
    KINDS,
    MIXED,
    SWOR,
    TOP,
    complete,
    takes_laws,
)
from verifiers import (
    GreedyMultiPathVerifier,
    TargetWalkVerifier,
    WeightedTransportVerifier,
)

RULES: dict[str, Verifier] = {**MIXED, "weighted transport, program": WeightedTransportVerifier(solver="program")}

# A looked-up branch, and a model's, which has two children; the same the other way round.
LOOKED_UP_FIRST = {(0,): TOP, (0, 0): TOP, (1,): None, (1, 0): None, (1, 1): None}
LOOKED_UP_LAST = {(0,): None, (0, 0): None, (0, 1): None, (1,): TOP, (1, 0): TOP}
# Two looked-up siblings around two drawn ones.
AROUND = {(0,): TOP, (1,): None, (2,): None, (3,): TOP}


@pytest.mark.parametrize("kinds", [complete("dense", strong=False), "every kind"])
@pytest.mark.parametrize("places", [LOOKED_UP_FIRST, LOOKED_UP_LAST, AROUND], ids=["first", "last", "around"])
@pytest.mark.parametrize(
    ("rule", "law"), [(rule, law) for rule in RULES for law in (IID, SWOR) if takes_laws(RULES[rule], TOP, law)]
)
def test_looked_up_branches_beside_drawn_ones_are_exact(
    rule: str, law: DraftSampling, places: dict[tuple[int, ...], DraftSampling | None], kinds: str
) -> None:
    shape = TreeShape.from_paths(list(places))
    tables = Tables.random(3, shape.max_depth, seed=2, kinds=KINDS[kinds])
    laws = {path: place or law for path, place in places.items()}
    assert enumerate_outcome(RULES[rule], tables, shape, laws).tv < EXACT


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "target walk"])
def test_a_looked_up_token_that_is_taken_for_drawn_is_rejected(rule: str) -> None:
    law = IID if SWOR not in RULES[rule].samplings else SWOR
    tables, shape = Tables.random(4, 1, seed=21), TreeShape.branching(2)
    assert enumerate_outcome(RULES[rule], tables, shape, (TOP, law)).tv < EXACT
    assert enumerate_outcome(RULES[rule], tables, shape, (TOP, law), declared=law).tv > BIASED


def test_paths_that_are_certain_are_walked() -> None:
    """A row of paths with a looked-up one among them: exact, as the walk is for any draft."""
    tables, shape = Tables.random(3, 2, seed=4), TreeShape.branching(2, 1)
    laws = {(0,): TOP, (0, 0): TOP, (1,): IID, (1, 0): IID}
    mixed, walk = (
        enumerate_outcome(rule, tables, shape, laws) for rule in (GreedyMultiPathVerifier(), TargetWalkVerifier())
    )
    assert mixed.tv < EXACT
    assert mixed.expected_accepted == pytest.approx(walk.expected_accepted, abs=EXACT)
