"""The target that several tests of heads share."""

import pytest

from specdec.target.target import Target
from tests.models import tiny_model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=64))
