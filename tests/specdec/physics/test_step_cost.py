"""Costs of forwards: planted constants come back, files are kept, and what is refused."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specdec.drafting.costs import Conditions, RoundCosts
from specdec.drafting.policies import CostAwareLength
from specdec.physics import costs
from specdec.physics.calibrated import Box, CalibratedRounds, is_calibrated
from specdec.physics.costs import Errors, PartCost, StepCost, StepSize, TokenRange, check_possible, fit_step
from specdec.physics.rounds import round_seconds
from specdec.physics.work import Roof

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
    for rows, queries, context in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (64, 256, 960))
]


def timed(cost: StepCost, *, noise: float = 0.0) -> list[float]:
    random = np.random.default_rng(5)
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


def test_no_constant_is_below_zero_where_least_squares_without_bounds_finds_one() -> None:
    """Attention here costs nothing per position: noise would make it negative."""
    columns = np.array([[1, size.tokens, size.positions, size.pairs] for size in SIZES])
    seconds = np.array(timed(cost(1e-2, 1e-4, 0.0, 1e-6), noise=0.03))
    unbounded = np.linalg.lstsq(columns / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
    assert unbounded.min() < 0, "the mutant: least squares of the same errors, unbounded"
    with pytest.raises(ValueError, match="no number of seconds from 0 on"):
        cost(*unbounded)
    assert min(constants(fit_step(SIZES, seconds.tolist()))) >= 0


def test_the_fits_recover_planted_constants() -> None:
    found = fit_step(SIZES, timed(PLANTED), ends=(1, 16))
    assert [each.upto for each in found.ranges] == [each.upto for each in PLANTED.ranges]
    assert constants(found) == pytest.approx(constants(PLANTED), rel=1e-5, abs=1e-12)
    levels = TokenRange(upto=1, fixed=2e-4, per_token=0.0), TokenRange(upto=None, fixed=3e-4, per_token=2e-5)
    planted = PartCost(fixed=2e-3, levels=levels, per_position=1e-7)
    sizes = [
        {"levels": depth, "tokens": rows * depth, "positions": rows * context}
        for depth, rows, context in itertools.product((1, 2, 4), (1, 4, 8), (16, 500))
    ]
    found = costs.fit_part(sizes, [planted.seconds(**size) for size in sizes], ends=(1, 16))
    assert [each.upto for each in found.levels] == [1, None]
    assert [found.fixed, found.levels[0].fixed, found.levels[1].fixed] == pytest.approx([2e-3, 2e-4, 3e-4], rel=1e-5)
    assert [found.levels[1].per_token, found.per_position] == pytest.approx([2e-5, 1e-7], rel=1e-5)


def test_what_gives_no_cost_is_refused() -> None:
    for seconds, message in ((timed(PLANTED)[:2], "2 measured"), ([0.0] * len(SIZES), "above 0")):
        with pytest.raises(ValueError, match=message):
            fit_step(SIZES[: len(seconds)], seconds)
    for ends in ((), (4, 4, None), (3,)):
        ranges = tuple(TokenRange(upto=end, fixed=1.0, per_token=0.0) for end in ends)
        with pytest.raises(ValueError, match="ranges of a cost"):
            StepCost(ranges=ranges, per_position=0.0, per_pair=0.0)


HERE = Conditions(device="a chip", dtype="bfloat16", model="a model", fingerprint="0123456789ab", drafter="Drafts")
COSTS = CalibratedRounds(
    conditions=HERE,
    box=Box(batch=(1, 8), context=(16, 960), drafted=(0, 15), chunk=(16, 192)),
    target=StepCost(ranges=(TokenRange(upto=None, fixed=5e-3, per_token=2e-4),), per_position=4e-7, per_pair=0.0),
    drafting=PartCost(fixed=1e-3, levels=(TokenRange(upto=None, fixed=5e-4, per_token=0.0),)),
    judging=PartCost(fixed=2e-4, levels=(TokenRange(upto=None, fixed=1e-5, per_token=0.0),)),
    host=1e-4,
    deepest=8,
    errors={"target": {"held_out": Errors(median=0.03, p95=0.1, worst=0.2, points=24)}},
    peaks={"copy": 2e10, "read": 3e10, "flops": 4e11, "cache_bytes": 1e6},
    measured=((1, 16, 0, 5e-3, 5.1e-3, 0, 0),),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    COSTS.save(path)
    return path


def test_a_file_says_the_same_and_others_are_refused(file: Path) -> None:
    assert CalibratedRounds.load(file) == COSTS
    assert is_calibrated(file)
    whole = json.loads(file.read_text())
    for content, said in (("{}", r"costs\.json holds no calibrated costs"), (json.dumps(whole | {"new": 1}), "new")):
        file.write_text(content)
        with pytest.raises(ValueError, match=said):
            CalibratedRounds.load(file)


def test_a_round_is_the_sum_of_its_parts_by_hand() -> None:
    verify = 5e-3 + 2e-4 * 2 * 4 + 4e-7 * 2 * 100
    draft = 1e-3 + 3 * 5e-4 + 3 * 1e-5
    assert COSTS.verify(batch=2, drafted=3, context=100) == pytest.approx(verify)
    assert COSTS.draft(batch=2, drafted=3, context=100) == pytest.approx(draft)
    assert COSTS.outside == pytest.approx(3e-4)
    assert round_seconds(COSTS, batch=2, drafted=3, context=100) == pytest.approx(verify + draft + 3e-4)
    assert COSTS.draft(batch=2, drafted=0, context=100) == 0
    deepest = np.array([0, 3])
    assert COSTS.ragged(2, 200.0, drafted=np.array([0, 4]), deepest=deepest) == pytest.approx(
        [round_seconds(COSTS, batch=2, drafted=int(depth), context=100) for depth in deepest]
    )
    assert COSTS.prefill_seconds(StepSize(tokens=64, positions=100, pairs=0)) == pytest.approx(5e-3 + 64 * 2e-4 + 4e-5)


def test_policies_get_the_costs_of_rounds_where_there_are_a_drafters(file: Path) -> None:
    costs = CostAwareLength(file).costs
    assert isinstance(costs, RoundCosts)
    assert costs.rows == (1, 2, 4, 8) and costs.max_depth == 8 and costs.conditions == HERE
    expected = [round_seconds(COSTS, batch=4, drafted=depth, context=488) for depth in range(9)]
    assert costs.seconds(4, 8) == pytest.approx(expected)
    # Those of nodes pay for the whole draft, and trees what their rounds cost.
    seconds = RoundCosts.load(file, by_nodes=True).by_nodes(2, 8)
    whole = COSTS.draft(batch=2, drafted=8, context=488) + COSTS.outside
    expected = [COSTS.verify(batch=2, drafted=nodes, context=488) + whole for nodes in range(9)]
    assert seconds == pytest.approx(np.array(expected))
    assert COSTS.of_tree(12, 3, rows=2) == round_seconds(COSTS, batch=2, drafted=12, depth=3, context=488)
    assert COSTS.of_tree(16, 3, rows=2) == COSTS.of_tree(12, 9, rows=2) == float("inf"), "larger than was measured"
    replace(COSTS, drafting=None, deepest=0).save(file)
    for asked in (RoundCosts.load, lambda path: CalibratedRounds.load(path).of_tree(1, 1, rows=1)):
        with pytest.raises(ValueError, match="have no drafter's"):
            asked(file)


# What no device can do. A model of 1 GB, 100 kB per position, 1 GFLOP per token; a device of 100 GB/s and 10 TFLOP/s.
LEAST = costs.LeastWork(weight_bytes=1e9, kv_bytes=1e5, token_flops=1e9, pair_flops=1e5)
ROOF = Roof(bandwidth=1e11, flops=1e13)
FORWARDS = [
    StepSize.of(rows=rows, queries=queries, context=context)
    for rows, queries, context in itertools.product((1, 8, 64), (1, 32), (100, 4000))
]
DELTA, GAMMA, ALPHA = 1e-2, 1e-4, 1e-6


def cost(delta: float = DELTA, gamma: float = GAMMA, alpha: float = ALPHA, beta: float = 1e-8) -> StepCost:
    ranges = (TokenRange(upto=None, fixed=delta, per_token=gamma),)
    return StepCost(ranges=ranges, per_position=alpha, per_pair=beta)


def test_what_is_faster_than_physics_and_caches_is_refused() -> None:
    """A range in the middle whose times per token are right at its ends, and nothing is left for its operations.

    The bounds themselves are possible; faster is only what the caches, a quarter as large as the work, may hold.
    """
    steps = ((8, GAMMA), (256, 0.0), (None, GAMMA))
    ranges = tuple(TokenRange(upto=end, fixed=DELTA, per_token=per_token) for end, per_token in steps)
    with pytest.raises(ValueError, match="of 256 tokens behind 800 positions would take"):
        check_possible(StepCost(ranges=ranges, per_position=ALPHA, per_pair=1e-8), FORWARDS, LEAST, ROOF, cache_bytes=0)
    check_possible(cost(), FORWARDS, LEAST, ROOF, cache_bytes=0)
    fast = cost(delta=0.1 * DELTA)
    check_possible(fast, FORWARDS[:1], LEAST, ROOF, cache_bytes=3e8)
    with pytest.raises(ValueError, match="faster than physics"):
        check_possible(fast, FORWARDS[:1], LEAST, ROOF, cache_bytes=2e8)
