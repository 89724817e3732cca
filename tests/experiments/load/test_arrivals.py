"""Arrival processes: their laws, with mutants that the same tests must reject; the same seed, the same moments."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import kstest

from experiments.load.arrivals import (
    Arrivals,
    Batch,
    Diurnal,
    Gaps,
    Ramp,
    Spike,
    Times,
    Users,
    arriving,
)
from experiments.load.run import CLOSED, OPEN

COUNT = 4000
REJECTED = 1e-4
"""Fits below this are none: a right process is below it once in 10,000 seeds, and the seed is fixed."""


def drawn(arrivals: Arrivals, count: int = COUNT, seed: int = 7) -> Times:
    return arrivals.times(np.random.default_rng(seed), count)


def fit_of_gaps(times: Times, rate: float, cv: float) -> float:
    """How well gaps fit a gamma distribution of this mean and variation."""
    gaps = np.diff(times, prepend=0.0)
    return float(kstest(gaps, "gamma", args=(1 / cv**2, 0, cv**2 / rate)).pvalue)


def fit_of_rate(times: Times, expected: Callable[[Times], Times]) -> float:
    """How well times fit a Poisson process with so many expected arrivals until t: in these it has the rate 1."""
    told = expected(times)
    gaps = kstest(np.diff(told, prepend=0.0), "expon").pvalue
    return float(min(gaps, kstest(told[:-1] / told[-1], "uniform").pvalue))


@pytest.mark.parametrize(
    ("arrivals", "cv", "mutants"),
    [
        (Gaps(rate=3), 1.0, [Gaps(rate=3.4), Gaps(rate=3, cv=1.2), Gaps(rate=3, cv=0)]),
        (Gaps(rate=3, cv=2), 2.0, [Gaps(rate=4, cv=2), Gaps(rate=3, cv=2.6), Gaps(rate=3)]),
        (Gaps(rate=3, cv=0.5), 0.5, [Gaps(rate=3, cv=0.6), Gaps(rate=3)]),
    ],
)
def test_gaps_have_their_mean_and_variation(arrivals: Arrivals, cv: float, mutants: list[Arrivals]) -> None:
    assert fit_of_gaps(drawn(arrivals), 3, cv) > 0.01
    assert all(fit_of_gaps(drawn(mutant), 3, cv) < REJECTED for mutant in mutants)


def spike(at: Times, factor: float = 6.0) -> Times:
    return 3 * (at + (factor - 1) * np.clip(at - 50, 0, 100))


def diurnal(at: Times, amplitude: float = 0.8) -> Times:
    return 3 * (at + amplitude * 40 / (2 * np.pi) * (1 - np.cos(2 * np.pi * at / 40)))


def ramp(at: Times, factor: float = 5.0) -> Times:
    on_the_way = np.clip(at, 0, 200)
    return 3 * (on_the_way + (factor - 1) * on_the_way**2 / 400 + factor * np.clip(at - 200, 0, None))


def exponential(at: Times, factor: float = 5.0) -> Times:
    on_the_way = 200 / np.log(factor) * (factor ** np.clip(at / 200, 0, 1) - 1)
    return 3 * (on_the_way + factor * np.clip(at - 200, 0, None))


@pytest.mark.parametrize(
    ("arrivals", "expected", "other"),
    [
        (Spike(rate=3, factor=6, begin=50, length=100), spike, 4.8),
        (Spike(rate=3, factor=0.1, begin=50, length=100), lambda at, factor=0.1: spike(at, factor), 1.0),
        (Diurnal(rate=3, amplitude=0.8, period=40), diurnal, 0.0),
        (Ramp(rate=3, factor=5, length=200), ramp, 4.0),
        (Ramp(rate=3, factor=5, length=200, exponential=True), exponential, 4.0),
    ],
)
def test_rates_that_vary_are_thinned(arrivals: Arrivals, expected: Any, other: float) -> None:
    times = drawn(arrivals)
    assert fit_of_rate(times, expected) > 0.01
    assert fit_of_rate(times, lambda at: expected(at, other)) < REJECTED, "another height of the same shape"
    assert fit_of_rate(drawn(Gaps(rate=COUNT / times[-1])), expected) < REJECTED, "the same mean, not thinned"


def test_a_ramp_by_factors_is_not_one_by_amounts() -> None:
    assert fit_of_rate(drawn(Ramp(rate=3, factor=5, length=200)), exponential) < REJECTED


@pytest.mark.parametrize("arrivals", [Gaps(cv=0), Gaps(), Gaps(cv=2), Spike(), Diurnal(), Ramp(), Users(think=1.0)])
def test_a_seed_decides_everything(arrivals: Arrivals) -> None:
    times = drawn(arrivals, 50)
    assert (drawn(arrivals, 50) == times).all() and len(times) == 50
    assert not getattr(arrivals, "cv", 1) or (drawn(arrivals, 50, seed=8) != times).any()
    if arrivals.loop == OPEN:
        assert (np.diff(times) >= 0).all() and times[0] >= 0
        fast = drawn(arrivals.at_rate(10 * arrivals.rate), COUNT)
        assert fast[-1] < 0.2 * drawn(arrivals, COUNT)[-1] and type(arrivals.at_rate(2)) is type(arrivals)


def test_users_begin_at_once_and_think_later() -> None:
    users = Users(rate=3, think=2.0)
    times = drawn(users)
    assert users.loop == CLOSED and (times[:3] == 0).all()
    assert float(kstest(times[3:], "expon", args=(0, 2.0)).pvalue) > 0.01
    assert not drawn(Users(rate=3)).any()


def test_requests_and_seconds_both_end_the_arrivals() -> None:
    def ends(requests: int | None, seconds: float | None, arrivals: Arrivals | None = None) -> Times:
        return arriving(arrivals or Gaps(rate=5), np.random.default_rng(1), requests=requests, seconds=seconds)

    within = ends(None, 60)
    assert 200 < len(within) < 400 and within[-1] < 60
    assert (ends(len(within), None) == within).all(), "the same ones as without a limit on time"
    assert ends(len(within) + 1, None)[-1] >= 60, "and the next one is too late"
    assert (ends(10, 60) == within[:10]).all() and (ends(1000, 60)[: len(within)] == within).all()
    assert not ends(7, None, Batch()).any() and Batch().rate == np.inf
    for requests, seconds, arrivals in ((None, None, Gaps()), (None, 5.0, Users())):
        with pytest.raises(ValueError, match="requests=null: give a number"):
            ends(requests, seconds, arrivals)
    with pytest.raises(ValueError, match="seconds=1e-09: no request arrives so early"):
        ends(5, 1e-9)
