"""The contract of every drafter of this project: a line in the table for each."""

from collections.abc import Callable

import pytest
from mine.drafter import RepeatDrafter

import verifiers  # noqa: F401 (the rules that outputs are tried with are those that have been imported)
from specdec import Drafter, Target
from specdec.drafter_checks import assert_conforms

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "repeat": lambda: RepeatDrafter(4),
}


@pytest.fixture(scope="module")
def target() -> Target:
    """The bundled one, whose vocabulary every look-up fits."""
    return Target.from_pretrained("bundled/target", dtype="float32")


@pytest.mark.parametrize("name", DRAFTERS)
def test_it_conforms(name: str, target: Target) -> None:
    """Everything that docs/write-a-drafter.md lists, with every rule that takes its drafts."""
    assert_conforms(DRAFTERS[name], target, tokens=16, rounds=40, draws=1600)
