"""Fitted costs of forwards: planted constants come back, and wrong ways to fit are told apart."""

import numpy as np
import pytest

from specdec.physics.step_cost import (
    Errors,
    PartCost,
    StepCost,
    StepSize,
    TokenRange,
    fit_part,
    fit_step,
)

PLANTED = StepCost(
    ranges=(
        TokenRange(upto=1, fixed=9e-3, per_token=0.0),
        TokenRange(upto=16, fixed=9.2e-3, per_token=4.4e-4),
        TokenRange(upto=None, fixed=12.8e-3, per_token=4.7e-4),
    ),
    per_position=6e-6,
    per_pair=2.7e-7,
)
SIZES = [
    StepSize.of(rows=rows, queries=queries, context=context)
    for rows in (1, 2, 4, 8)
    for queries in (1, 2, 4, 8, 16)
    for context in (64, 256, 960)
]


def timed(cost: StepCost, *, noise: float = 0.0, seed: int = 0) -> list[float]:
    random = np.random.default_rng(seed)
    return [cost.seconds(size) * (1 + noise * random.normal()) for size in SIZES]


def constants(cost: StepCost) -> list[float]:
    by_range = [number for each in cost.ranges for number in (each.fixed, each.per_token)]
    return [*by_range, cost.per_position, cost.per_pair]


def test_sizes_seconds_and_errors_are_counted_by_hand() -> None:
    size = StepSize.of(rows=2, queries=3, context=10)
    # Every row: queries that see 11, 12 and 13 positions.
    assert (size.tokens, size.positions, size.pairs) == (6, 20, 2 * (11 + 12 + 13))
    ranges = (TokenRange(upto=4, fixed=1.0, per_token=0.5), TokenRange(upto=None, fixed=3.0, per_token=0.25))
    cost = StepCost(ranges=ranges, per_position=0.01, per_pair=0.001)
    assert cost.seconds(StepSize(tokens=4, positions=100, pairs=1000)) == pytest.approx(1 + 2 + 1 + 1)
    assert cost.seconds(StepSize(tokens=5, positions=100, pairs=1000)) == pytest.approx(3 + 1.25 + 1 + 1)
    found = Errors.of([1.1, 2.0, 0.7], [1.0, 2.0, 1.0])
    assert (found.median, found.worst, found.points) == (pytest.approx(0.1), pytest.approx(0.3), 3)
    assert found.p95 == pytest.approx(0.1 + 0.9 * 0.2)


def test_the_fit_recovers_planted_constants() -> None:
    found = fit_step(SIZES, timed(PLANTED), ends=(1, 16))
    assert found.ends == PLANTED.ends
    assert constants(found) == pytest.approx(constants(PLANTED), rel=1e-5, abs=1e-12)
    # A range that nothing was measured in is left out.
    several = [size for size in SIZES if size.tokens > 1]
    assert fit_step(several, [PLANTED.seconds(size) for size in several], ends=(1, 16, 4096)).ends == (16,)


def test_no_constant_is_below_zero_where_least_squares_without_bounds_finds_one() -> None:
    """Attention here costs nothing per position: noise would make it negative."""
    planted = StepCost(ranges=(TokenRange(upto=None, fixed=1e-2, per_token=1e-4),), per_position=0.0, per_pair=1e-6)
    columns = np.array([[1, size.tokens, size.positions, size.pairs] for size in SIZES])
    seconds = np.array(timed(planted, noise=0.03, seed=5))
    unbounded = np.linalg.lstsq(columns / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
    assert unbounded.min() < 0, "the mutant: least squares of the same errors, unbounded"
    with pytest.raises(ValueError, match="no number of seconds from 0 on"):
        StepCost(
            ranges=(TokenRange(upto=None, fixed=unbounded[0], per_token=unbounded[1]),),
            per_position=unbounded[2],
            per_pair=unbounded[3],
        )
    assert min(constants(fit_step(SIZES, seconds.tolist()))) >= 0


def test_the_fit_of_a_part_recovers_planted_constants() -> None:
    alone, together = (
        TokenRange(upto=1, fixed=2e-4, per_token=0.0),
        TokenRange(upto=None, fixed=3e-4, per_token=2e-5),
    )
    planted = PartCost(fixed=2e-3, levels=(alone, together), per_position=1e-7)
    sizes = [
        {"levels": levels, "tokens": rows * levels, "positions": rows * context}
        for levels in (1, 2, 4)
        for rows in (1, 4, 8)
        for context in (16, 500)
    ]
    found = fit_part(sizes, [planted.seconds(**size) for size in sizes], ends=(1, 16))
    assert [each.upto for each in found.levels] == [1, None]
    assert [found.fixed, found.levels[0].fixed, found.levels[1].fixed] == pytest.approx([2e-3, 2e-4, 3e-4], rel=1e-5)
    assert [found.levels[1].per_token, found.per_position] == pytest.approx([2e-5, 1e-7], rel=1e-5)


def test_what_gives_no_cost_is_refused() -> None:
    for seconds, message in (([], "0 measured"), (timed(PLANTED)[:2], "2 measured"), ([0.0] * len(SIZES), "above 0")):
        with pytest.raises(ValueError, match=message):
            fit_step(SIZES[: len(seconds)], seconds)
    for ends in ((), (None, 4), (4, 4, None), (8, 4, None), (3,)):
        ranges = tuple(TokenRange(upto=end, fixed=1.0, per_token=0.0) for end in ends)
        with pytest.raises(ValueError, match="ranges of a cost"):
            StepCost(ranges=ranges, per_position=0.0, per_pair=0.0)
