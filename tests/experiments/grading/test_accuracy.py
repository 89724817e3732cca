"""Accuracy from the scores of single documents, paired with plain decoding's."""

import numpy as np

from experiments.grading.accuracy import accuracies, scores_of
from experiments.results.frame import Figures
from experiments.results.statistics import Bootstrap

BOOTSTRAP = Bootstrap(resamples=2000)


def compared(plain: list[float], own: list[float], bootstrap: Bootstrap = BOOTSTRAP) -> Figures:
    key = ("gsm8k", "exact_match")
    (found,) = accuracies({key: dict(enumerate(plain))}, {key: dict(enumerate(own))}, bootstrap)
    return found


def test_the_difference_is_paired_by_document() -> None:
    found = compared([1, 0.5, 0, 1], [1, 0, 0.5, 1])
    assert (found.plain, found.accuracy, found.difference) == (5 / 8, 5 / 8, 0.0)
    assert (found.better, found.worse, found.documents) == (1, 1, 4)
    # The differences are 0, -1/2, 1/2, 0. An unpaired interval would be several times as wide.
    assert found.difference_interval == (-0.375, 0.375)
    same = compared([1, 0, 1, 1], [1, 0, 1, 1])
    assert same.interval is not None and same.interval[0] < same.interval[1]
    assert (same.difference, same.difference_interval) == (0.0, (0.0, 0.0)), "equal outcomes leave no doubt"


def test_a_method_that_spoils_answers_is_found_and_one_that_does_not_is_not() -> None:
    """300 documents, plain decoding right on 60 %. A method that loses 10 % of those answers has an interval below 0.

    A method that answers anew (right on 60 %, independently) has a 95 % interval that leaves out 0 in about 5 % of
    trials: more than 7 of 40 would happen with a probability of 0.1 % (binomial).
    """
    draw = np.random.default_rng(5)
    fast = Bootstrap(resamples=300)
    plain = (draw.random(300) < 0.6).astype(float)
    spoiled = compared(list(plain), list(plain * (draw.random(300) > 0.1)), fast)
    assert spoiled.difference_interval is not None and spoiled.difference_interval[1] < 0
    excluded = 0
    for _ in range(40):
        first, anew = ((draw.random(300) < 0.6).astype(float) for _ in range(2))
        low, high = compared(list(first), list(anew), fast).difference_interval or (0, 0)
        excluded += not low <= 0 <= high
    assert excluded <= 7


def test_scores_come_from_lm_evals_samples() -> None:
    sample = {"doc_id": 3, "filter": "none", "metrics": ["acc", "perplexity"], "acc": True, "perplexity": (-3.5, 7)}
    strict = {"doc_id": 3, "filter": "strict-match", "metrics": ["exact_match"], "exact_match": np.float64(0.5)}
    found = scores_of({"samples": {"a": [sample], "b": [strict]}})
    assert found == {("a", "acc"): {3: 1.0}, ("b", "exact_match, strict-match"): {3: 0.5}}


def test_only_what_both_have_answered_counts() -> None:
    key, other = ("a", "acc"), ("b", "acc")
    found = accuracies({key: {0: 1.0, 1: 0.0}, other: {0: 1.0}}, {key: {1: 1.0, 2: 1.0}}, BOOTSTRAP)
    assert [(each.task, each.documents, each.plain, each.accuracy) for each in found] == [("a", 1, 0.0, 1.0)]
    assert found[0].interval is None, "one document says nothing about the others"
