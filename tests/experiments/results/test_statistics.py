"""Bootstrap intervals: by hand, coverage, what they refuse; and the noise in timings."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from experiments.reporting.columns import FEW_PROMPTS
from experiments.results.noise import noise_of, reasons
from experiments.results.records import PLAIN, Record
from experiments.results.statistics import Bootstrap, ratio_of_sums, throughput_ratio
from tests.experiments.results.outputs import output

DEFAULT = Bootstrap()


def test_ratios() -> None:
    tokens, seconds = np.array([10.0, 30.0]), np.array([1.0, 3.0])
    assert ratio_of_sums(tokens, seconds) == 10
    # Not the mean of the prompts' ratios: a long prompt counts for more.
    assert ratio_of_sums(np.array([10.0, 90.0]), np.array([1.0, 3.0])) == 25
    assert throughput_ratio(tokens, seconds, np.array([10.0, 10.0]), np.array([2.0, 2.0])) == 2


def test_two_prompts_by_hand() -> None:
    # Resamples are both prompts (half of the time), or either one twice: lengths 2, 1.5 and 1.
    low, high = DEFAULT.interval(ratio_of_sums, [[20, 10], [10, 10]]) or (0, 0)
    assert (low, high) == (1, 2)
    # Student's quantile with one degree of freedom times the root of 2 leaves a normal tail of 0.28: the middle ones.
    low, high = Bootstrap(confidence=0.25).interval(ratio_of_sums, [[20, 10], [10, 10]]) or (0, 0)
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


@pytest.mark.parametrize(("prompts", "covered"), [(3, 0.74), (FEW_PROMPTS, 0.92), (10, 0.94)])
def test_coverage_of_few_prompts(prompts: int, covered: float) -> None:
    """Intervals of three prompts are too narrow, as tables say; percentiles alone would be at five, too (85 %)."""
    draw, quick, hits = np.random.default_rng(2), Bootstrap(resamples=2000), 0
    for _ in range(1000):
        low, high = quick.interval(np.mean, [draw.normal(size=prompts)]) or (0, 0)
        hits += low <= 0 <= high
    few, many = binom(1000, covered).ppf([1e-3, 1 - 1e-3])
    assert few <= hits <= many
    assert prompts != FEW_PROMPTS or few > binom(1000, 0.853).ppf(0.999)


@pytest.mark.parametrize("given", [{"confidence": 95}, {"resamples": 1}, {"seed": -1}, {"width": 0}], ids=str)
def test_bad_settings(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="bootstrap.{}={}".format(*next(iter(given.items())))):
        Bootstrap(**given)


IDLE = {"cores": 4, "own": 1.0, "others": 0.1}


def record(batch: int, per_round: float, *, method: str = PLAIN, tokens: int = 50, **more: object) -> Record:
    """Ten rounds of so many seconds, and a prefill of 1 s."""
    fields = {"batch": batch, "prompt_tokens": tokens, "accepted": (0,) * 10, "seconds": 1 + 10 * per_round}
    fields |= {"prompt": f"p{batch}", "stage_seconds": {"prefill": 1.0}, "load": IDLE}
    return output(**{"method": method} | fields | more)


def noise(times: Sequence[float], load: Mapping[str, float] = IDLE) -> dict[str, Any]:
    return noise_of([record(batch, time, load=load) for batch, time in enumerate(times)], PLAIN)


def test_the_spread_is_the_standard_deviation_over_the_median() -> None:
    chance = random.Random(0)
    # 400 draws: the estimate from quartiles is off by more than 15 % with odds of about 1 in 100; seeded.
    found = noise([chance.gauss(0.1, 0.02) for _ in range(400)])
    assert found["noise_spread"] == pytest.approx(0.2, rel=0.15)
    assert found["noisy"] and "varies by ±" in reasons(found)[0]
    # The mutant: a tenth of that is within the limit.
    assert not noise([chance.gauss(0.1, 0.002) for _ in range(400)])["noisy"]


def test_what_the_length_explains_is_no_noise() -> None:
    """A round takes longer after a longer prompt: 0.1 s at 100 tokens, 0.4 s at 1600."""
    lengths = [100, 400, 700, 1000, 1300, 1600]
    records = [record(n, 0.1 + 0.0002 * (size - 100), tokens=size) for n, size in enumerate(lengths)]
    found = noise_of(records, PLAIN)
    assert found["noise_spread"] == pytest.approx(0, abs=1e-9)
    # The mutant: the same times at one length are noise.
    alike = noise_of([record(n, 0.1 + 0.0002 * (size - 100)) for n, size in enumerate(lengths)], PLAIN)
    assert alike["noisy"]


def test_the_load_of_other_processes_is_a_mean_over_time_and_counts_a_batch_once() -> None:
    for cores, own, others, noisy in (
        (4, 1.0, 0.3, False),  # below a tenth of the cores
        (4, 1.0, 1.5, False),  # more than a quarter of the cores is idle
        (4, 2.0, 1.5, True),
        (2, 1.0, 0.9, True),
    ):
        found = noise([0.1] * 5, load={"cores": cores, "own": own, "others": others})
        assert found["noisy"] is noisy
        assert (f"other processes used {others:.1f} of the {cores} cores" in reasons(found)) is noisy
    slow = {"cores": 4, "own": 1.0, "others": 3.0}
    below = {"cores": 4, "own": 1.0, "others": -0.2}  # of a short time, as the system counts in steps
    records = [record(0, 0.9, load=slow), record(0, 0.9, prompt="other", load=slow), record(1, 0.0, load=below)]
    found = noise_of(records, PLAIN)
    assert found["other_cores"] == pytest.approx((10 * 3.0 - 1 * 0.2) / 11)
