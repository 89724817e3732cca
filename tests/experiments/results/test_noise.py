"""Noise in timings: figures of synthetic records, and the limits beyond which a run is called noisy."""

import random
from collections.abc import Mapping, Sequence

import pytest

from experiments.results.frame import Figures
from experiments.results.noise import noise_of
from experiments.results.records import PLAIN, Record
from tests.experiments.results.outputs import output

IDLE = {"cores": 4, "own": 1.0, "others": 0.1}


def record(batch: int, per_round: float, *, method: str = PLAIN, tokens: int = 50, **more: object) -> Record:
    """Ten rounds of so many seconds, and a prefill of 1 s."""
    fields = {"batch": batch, "prompt_tokens": tokens, "accepted": (0,) * 10, "seconds": 1 + 10 * per_round}
    fields |= {"prompt": f"p{batch}", "stage_seconds": {"prefill": 1.0}, "load": IDLE}
    return output(**{"method": method} | fields | more)


def noise(times: Sequence[float], load: Mapping[str, float] = IDLE) -> Figures:
    found = noise_of([record(batch, time, load=load) for batch, time in enumerate(times)], PLAIN)
    assert found is not None
    return found


def test_the_spread_is_the_standard_deviation_over_the_median() -> None:
    chance = random.Random(0)
    # 400 draws: the estimate from quartiles is off by more than 15 % with odds of about 1 in 100; seeded.
    found = noise([chance.gauss(0.1, 0.02) for _ in range(400)])
    assert found.spread == pytest.approx(0.2, rel=0.15)
    assert found.noisy
    assert "varies by ±" in str(found.warning)
    # The mutant: a tenth of that is within the limit.
    assert not noise([chance.gauss(0.1, 0.002) for _ in range(400)]).noisy


def test_what_the_length_explains_is_no_noise() -> None:
    """A round takes longer after a longer prompt: 0.1 s at 100 tokens, 0.4 s at 1600."""
    lengths = [100, 400, 700, 1000, 1300, 1600]
    records = [record(n, 0.1 + 0.0002 * (size - 100), tokens=size) for n, size in enumerate(lengths)]
    found = noise_of(records, PLAIN)
    assert found is not None
    assert found.spread == pytest.approx(0, abs=1e-9)
    # The mutant: the same times at one length are noise.
    alike = noise_of([record(n, 0.1 + 0.0002 * (size - 100)) for n, size in enumerate(lengths)], PLAIN)
    assert alike is not None
    assert alike.noisy


def test_the_load_of_other_processes_is_a_mean_over_time_and_counts_a_batch_once() -> None:
    for cores, own, others, noisy in (
        (4, 1.0, 0.3, False),  # below a tenth of the cores
        (4, 1.0, 1.5, False),  # more than a quarter of the cores is idle
        (4, 2.0, 1.5, True),
        (2, 1.0, 0.9, True),
    ):
        found = noise([0.1] * 5, load={"cores": cores, "own": own, "others": others})
        assert found.noisy is noisy
        assert (f"other processes used {others:.1f} of the {cores} cores" in str(found.warning)) is noisy
    slow = {"cores": 4, "own": 1.0, "others": 3.0}
    below = {"cores": 4, "own": 1.0, "others": -0.2}  # of a short time, as the system counts in steps
    records = [record(0, 0.9, load=slow), record(0, 0.9, prompt="other", load=slow), record(1, 0.0, load=below)]
    found = noise_of(records, PLAIN)
    assert found is not None
    assert found.other_cores == pytest.approx((10 * 3.0 - 1 * 0.2) / 11)
