"""The contract of every drafter of this project: a line in the table for each."""

from collections.abc import Callable

import pytest
from mine.drafter import RepeatDrafter

from specdec import Drafter, Target
from specdec.checks.drafter import assert_conforms
from verifiers import RejectionVerifier

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "repeat": lambda: RepeatDrafter(4),
}


@pytest.fixture(scope="module")
def target() -> Target:
    """The bundled one, whose vocabulary every look-up fits."""
    return Target.from_pretrained("bundled/target", dtype="float32")


@pytest.mark.parametrize("name", DRAFTERS)
def test_it_conforms(name: str, target: Target) -> None:
    """Everything that docs/write-a-drafter.md lists."""
    assert_conforms(DRAFTERS[name], target, verifier=RejectionVerifier(), tokens=16, rounds=40, draws=1600)
