"""Accuracy from grades, by hand-computed figures, and the pairing with plain decoding."""

import itertools
import math

import numpy as np
import pytest

from experiments.grading.accuracy import Accuracy, accuracies, pass_at_k
from experiments.grading.grade import Grade
from experiments.results.statistics import Bootstrap

BOOTSTRAP = Bootstrap(resamples=2000)


@pytest.mark.parametrize(("samples", "correct"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 4), (5, 5)])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(samples: int, correct: int) -> None:
    outcomes = [True] * correct + [False] * (samples - correct)
    for k in range(1, samples + 1):
        choices = [any(chosen) for chosen in itertools.combinations(outcomes, k)]
        assert pass_at_k(samples, correct, k) == pytest.approx(sum(choices) / len(choices))


def test_the_naive_estimate_of_pass_at_k_is_biased_and_ours_is_not() -> None:
    """Over all outcomes of 4 samples with p = 0.3: 1 - (1 - c/n)^k has another expectation than 1 - (1 - p)^k."""
    n, k, p = 4, 2, 0.3
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    ours = sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
    naive = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weights))
    assert ours == pytest.approx(1 - (1 - p) ** k)
    assert abs(naive - (1 - (1 - p) ** k)) > 0.05


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"k=3 needs at least 3 samples .* there are 2"):
        pass_at_k(2, 1, 3)


def grades(method: str, *outcomes: list[bool | None], task: str = "gsm8k", temperature: float = 0.0) -> list[Grade]:
    return [
        Grade(
            task=task,
            prompt=f"p{number}",
            sample=sample,
            method=method,
            exactness=None if method == "plain" else "exact",
            temperature=temperature,
            correct=correct,
        )
        for number, samples in enumerate(outcomes)
        for sample, correct in enumerate(samples)
    ]


def of(found: list[Accuracy], method: str) -> Accuracy:
    return next(each for each in found if each.method == method)


def test_the_difference_is_paired_by_prompt() -> None:
    plain = grades("plain", [True, True], [True, False], [False, False], [True, True])
    other = grades("model", [True, True], [False, False], [True, False], [True, True])
    found = accuracies([*other, *plain], [1], BOOTSTRAP)
    assert [each.method for each in found] == ["plain", "model"], "plain decoding first"
    assert of(found, "plain").accuracy == 5 / 8
    assert of(found, "plain").difference is None
    model = of(found, "model")
    assert (model.accuracy, model.plain, model.difference) == (5 / 8, 5 / 8, 0.0)
    assert (model.better, model.worse, model.prompts, model.samples, model.left_out) == (1, 1, 4, 2, 0)
    # The differences by prompt are 0, -1/2, 1/2, 0. An unpaired interval would be several times as wide.
    low, high = model.difference_interval or (0, 0)
    assert (low, high) == (-0.375, 0.375)


def test_equal_outcomes_leave_no_doubt() -> None:
    outcomes = [[True], [False], [True], [True]]
    model = of(accuracies([*grades("plain", *outcomes), *grades("model", *outcomes)], [1], BOOTSTRAP), "model")
    assert model.interval is not None and model.interval[0] < model.interval[1]
    assert (model.difference, model.difference_interval) == (0.0, (0.0, 0.0))


def test_a_method_that_spoils_answers_is_found_and_one_that_does_not_is_not() -> None:
    """300 prompts, plain decoding right on 60 %. A method that loses 10 % of those answers has an interval below 0.

    A method that answers anew (right on 60 %, independently) has a 95 % interval that leaves out 0 in about 5 % of
    trials: more than 7 of 40 would happen with a probability of 0.1 % (binomial).
    """
    draw = np.random.default_rng(5)
    fast = Bootstrap(resamples=300)
    plain = [[bool(right)] for right in draw.random(300) < 0.6]
    spoiled = [[right and bool(kept)] for (right,), kept in zip(plain, draw.random(300) > 0.1, strict=True)]
    model = of(accuracies([*grades("plain", *plain), *grades("model", *spoiled)], [1], fast), "model")
    assert model.difference_interval is not None and model.difference_interval[1] < 0
    excluded = 0
    for _ in range(40):
        anew = [[bool(right)] for right in draw.random(300) < 0.6]
        first = [[bool(right)] for right in draw.random(300) < 0.6]
        model = of(accuracies([*grades("plain", *first), *grades("model", *anew)], [1], fast), "model")
        low, high = model.difference_interval or (0, 0)
        excluded += not low <= 0 <= high
    assert excluded <= 7


def test_what_failed_or_is_missing_counts_on_neither_side() -> None:
    plain = grades("plain", [True, True], [None, True], [True, True], [True, True])
    model = grades("model", [False, True], [True, True], [None, None], [True])  # the last was interrupted
    found = of(accuracies([*plain, *model], [1, 2], BOOTSTRAP), "model")
    assert (found.prompts, found.left_out) == (1, 3)
    assert (found.accuracy, found.plain) == (0.5, 1.0)
    nothing = accuracies([*grades("plain", [None]), *grades("model", [True])], [1], BOOTSTRAP)
    assert nothing == []


def test_benchmarks_and_temperatures_stay_apart() -> None:
    everything = [
        grade
        for task in ("mbpp", "gsm8k")
        for temperature in (0.0, 1.0)
        for method in ("plain", "model")
        for grade in grades(method, [True], [task == "mbpp"], task=task, temperature=temperature)
    ]
    found = accuracies(everything, [1], BOOTSTRAP)
    assert [(each.task, each.temperature, each.method) for each in found] == [
        (task, temperature, method)
        for task in ("gsm8k", "mbpp")
        for temperature in (0.0, 1.0)
        for method in ("plain", "model")
    ]
    assert {each.accuracy for each in found if each.task == "gsm8k"} == {0.5}


def test_a_method_without_plain_decoding_has_no_difference() -> None:
    (only,) = accuracies(grades("model", [True], [False]), [1], BOOTSTRAP)
    assert (only.accuracy, only.plain, only.difference, only.better) == (0.5, None, None, None)
