"""Bootstrap intervals: hand-computed cases, coverage, and what they refuse."""

import numpy as np
import pytest

from specdec import stats


def test_ratios() -> None:
    tokens, seconds = np.array([10.0, 30.0]), np.array([1.0, 3.0])
    assert stats.ratio_of_sums(tokens, seconds) == 10
    # Not the mean of the prompts' ratios: a long prompt counts for more.
    assert stats.ratio_of_sums(np.array([10.0, 90.0]), np.array([1.0, 3.0])) == 25
    assert stats.throughput_ratio(tokens, seconds, np.array([10.0, 10.0]), np.array([2.0, 2.0])) == 2


def test_one_prompt_gives_no_interval() -> None:
    assert stats.speedup_interval([10], [1], [10], [2]) is None
    assert stats.mean_acceptance_length_interval([], []) is None


def test_prompts_that_are_all_alike_give_an_interval_of_no_width() -> None:
    low, high = stats.speedup_interval([10] * 5, [1.0] * 5, [10] * 5, [2.0] * 5) or (0, 0)
    assert low == pytest.approx(2)
    assert high == pytest.approx(2)


def test_two_prompts_by_hand() -> None:
    # Resamples are both prompts (half of the time), or either one twice: lengths 2, 1.5 and 1.
    low, high = stats.mean_acceptance_length_interval([20, 10], [10, 10]) or (0, 0)
    assert (low, high) == (1, 2)
    low, high = stats.mean_acceptance_length_interval([20, 10], [10, 10], confidence=0.4) or (0, 0)
    assert (low, high) == (1.5, 1.5)


def test_pairing_takes_out_what_prompts_share() -> None:
    generator = np.random.default_rng(0)
    # Times differ tenfold between prompts, and hardly between the methods on one prompt.
    baseline = generator.uniform(1, 10, 30)
    seconds = baseline / 2 * generator.normal(1, 0.01, 30)
    tokens = np.full(30, 100.0)
    low, high = stats.speedup_interval(tokens, seconds, tokens, baseline) or (0, 0)
    assert low < 2 < high
    assert high - low < 0.05
    shuffled = generator.permutation(baseline)
    low, high = stats.speedup_interval(tokens, seconds, tokens, shuffled) or (0, 0)
    assert high - low > 0.3, "unpaired data should be far less certain"


def test_seeds_decide() -> None:
    data = np.random.default_rng(0).uniform(1, 2, (4, 20))
    assert stats.speedup_interval(*data, seed=1) == stats.speedup_interval(*data, seed=1)
    assert stats.speedup_interval(*data, seed=1) != stats.speedup_interval(*data, seed=2)


def test_coverage_is_about_what_it_says() -> None:
    generator = np.random.default_rng(1)
    rounds = 40
    hits = 0
    for seed in range(100):
        emitted = generator.binomial(rounds * 4, 0.5, size=30)
        low, high = stats.mean_acceptance_length_interval(emitted, [rounds] * 30, resamples=300, seed=seed) or (0, 0)
        hits += low <= 2 <= high
    # Binomial(100, 0.93): fewer than 83 has a chance of about 2e-4, and so have more than 99.
    assert 83 <= hits <= 99


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"confidence": 95}, "confidence=95"),
        ({"resamples": 1}, "resamples=1"),
    ],
)
def test_bad_settings(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stats.mean_acceptance_length_interval([1, 2], [1, 1], **arguments)


def test_columns_of_different_lengths() -> None:
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        stats.mean_acceptance_length_interval([1, 2], [1])
