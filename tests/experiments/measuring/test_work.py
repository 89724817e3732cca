"""The drafts of a check: counted without making them, and refused before it begins if they are too many."""

import itertools

import pytest

from experiments.measuring.exactness import LAWS, SHAPES, cases
from specdec.checks.drafts import enumerate_drafts, num_drafts
from specdec.checks.tables import Tables
from verifiers import TransportVerifier


def test_drafts_are_counted_without_making_them() -> None:
    for shape, law, vocab in itertools.product(SHAPES.values(), LAWS, (2, 3)):
        made = Tables.random(vocab, shape.max_depth, seed=0)
        assert num_drafts(shape, law, vocab) == len(enumerate_drafts(made, shape, law).probability)


@pytest.mark.parametrize("vocab", [12, 50])
def test_a_vocabulary_that_does_not_fit_is_refused_at_once(vocab: int) -> None:
    with pytest.raises(
        ValueError, match=rf"^vocab={vocab}: a tree of shape 2 x 2, drafted iid, has .* vocab=11 or less"
    ):
        next(cases(TransportVerifier(), vocab, 2, 0, [1]))
