"""The model whose generate is called."""

import pytest

from tests.models import tiny_model
from tests.specdec.generation.test_calls import VOCAB


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=VOCAB)
