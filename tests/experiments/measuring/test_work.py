"""The work of a check: counted exactly, refused before it begins, and shown while it lasts."""

import itertools

import pytest

from experiments.measuring.exactness import LAWS, SHAPES, Part, Work, cases, check_size, work_of
from specdec.checks.drafts import enumerate_drafts, num_drafts
from specdec.checks.tables import Tables
from specdec.types import DraftSampling
from verifiers import BlockVerifier, TransportVerifier

IID = DraftSampling.IID


def test_drafts_are_counted_without_making_them() -> None:
    for shape, law, vocab in itertools.product(SHAPES.values(), LAWS, (2, 3)):
        made = Tables.random(vocab, shape.max_depth, seed=0)
        assert num_drafts(shape, law, vocab) == len(enumerate_drafts(made, shape, law).probability)


def test_the_work_is_what_the_check_does() -> None:
    """Every part is advanced once per table, and there are as many drafts as announced."""
    work = work_of(BlockVerifier(), 2, 2, [1, 0.5])
    done: list[Part] = []
    list(cases(BlockVerifier(), 2, 2, 0, [1, 0.5], advance=done.append))
    assert sorted(set(done)) == sorted(work.drafts)
    assert {done.count(part) for part in work.drafts} == {work.turns} == {10}
    assert work.total == sum(work.drafts[part] for part in done)
    assert work.seconds is None, "so few need no estimate"


def test_a_vocabulary_that_does_not_fit_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"^vocab=50: a tree of shape 2 x 2, drafted iid, has 1.56e\+10 drafts"):
        work_of(TransportVerifier(), 50, 2, [1])
    parts = [("2 x 2", IID)]
    check_size(parts, 11)
    for vocab in (12, 50):
        with pytest.raises(ValueError, match="give vocab=11 or less"):
            check_size(parts, vocab)


def work_at(pace: float, vocab: int) -> Work:
    part = ("chain 3", IID)
    return Work({part: vocab**3}, 10, {part: pace}, {part: part})


def test_what_takes_too_long_is_refused_with_a_size_that_works() -> None:
    """1,000 drafts of 0.1 s in 10 turns take 17 minutes; 5 minutes are enough for a vocabulary of 6 (216 drafts)."""
    work_at(0.1, 10).check_time(10, max_minutes=17)
    with pytest.raises(ValueError, match=r"about 17 minutes .*max_minutes=5 .* give vocab=6 or less"):
        work_at(0.1, 10).check_time(10, max_minutes=5)
    with pytest.raises(ValueError, match="give fewer tables or temperatures, or raise max_minutes"):
        work_at(100.0, 10).check_time(10, max_minutes=1)
