"""Bootstrap intervals: hand-computed cases, coverage, and what they refuse."""

import numpy as np
import pytest

from experiments.results.statistics import Bootstrap, difference_of_means, ratio_of_sums, throughput_ratio

DEFAULT = Bootstrap()


def test_ratios() -> None:
    tokens, seconds = np.array([10.0, 30.0]), np.array([1.0, 3.0])
    assert ratio_of_sums(tokens, seconds) == 10
    # Not the mean of the prompts' ratios: a long prompt counts for more.
    assert ratio_of_sums(np.array([10.0, 90.0]), np.array([1.0, 3.0])) == 25
    assert throughput_ratio(tokens, seconds, np.array([10.0, 10.0]), np.array([2.0, 2.0])) == 2
    assert difference_of_means(*np.array([[2.0, 4.0], [1.0, 1.0], [1.0, 3.0], [1.0, 3.0]])) == 2


def test_two_prompts_by_hand() -> None:
    # Resamples are both prompts (half of the time), or either one twice: lengths 2, 1.5 and 1.
    low, high = DEFAULT.interval(ratio_of_sums, [[20, 10], [10, 10]]) or (0, 0)
    assert (low, high) == (1, 2)
    low, high = Bootstrap(confidence=0.4).interval(ratio_of_sums, [[20, 10], [10, 10]]) or (0, 0)
    assert (low, high) == (1.5, 1.5)


def test_pairing_takes_out_what_prompts_share() -> None:
    generator = np.random.default_rng(0)
    # Times differ tenfold between prompts, and hardly between the methods on one prompt.
    baseline = generator.uniform(1, 10, 30)
    seconds = baseline / 2 * generator.normal(1, 0.01, 30)
    tokens = np.full(30, 100.0)
    low, high = DEFAULT.interval(throughput_ratio, [tokens, seconds, tokens, baseline]) or (0, 0)
    assert low < 2 < high
    assert high - low < 0.05
    shuffled = generator.permutation(baseline)
    low, high = DEFAULT.interval(throughput_ratio, [tokens, seconds, tokens, shuffled]) or (0, 0)
    assert high - low > 0.3, "unpaired data should be far less certain"


def test_coverage_is_about_what_it_says() -> None:
    generator = np.random.default_rng(1)
    rounds = 40
    hits = 0
    for seed in range(100):
        emitted = generator.binomial(rounds * 4, 0.5, size=30)
        bootstrap = Bootstrap(resamples=300, seed=seed)
        low, high = bootstrap.interval(ratio_of_sums, [emitted, [rounds] * 30]) or (0, 0)
        hits += low <= 2 <= high
    # Binomial(100, 0.93): fewer than 83 has a chance of about 2e-4, and so have more than 99.
    assert 83 <= hits <= 99


@pytest.mark.parametrize("given", [{"confidence": 95}, {"resamples": 1}, {"seed": -1}], ids=str)
def test_bad_settings(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="bootstrap.{}={}".format(*next(iter(given.items())))):
        Bootstrap(**given)
