"""The model whose generate is called."""

import pytest


@pytest.fixture(scope="module")
def model():
    # Imported here: transformers imports Triton, which has to be told before that it interprets (tests/conftest.py).
    from tests.models import tiny_model
    from tests.specdec.generation.test_calls import VOCAB

    return tiny_model(vocab_size=VOCAB)
