"""The toy target, what it computes, and text that heads are tried on."""

import pytest

from experiments.inspecting.text import Text, prompts_of, text_of
from specdec.target.target import Target
from tests.experiments.inspecting.toys import Seen, toy_target


@pytest.fixture(scope="package")
def target() -> Target:
    return toy_target()


@pytest.fixture(scope="package")
def seen(target: Target) -> Seen:
    return Seen(target.model)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="package")
def texts(target: Target) -> dict[int, Text]:
    """Text by the depth of drafts. Seeded, so that every run tries the heads on the same."""
    prompts = prompts_of(target, None, 0)
    return {depth: text_of(target, prompts, tokens=40, depths=depth, places=160, seed=0) for depth in (1, 2, 3)}
