"""Figures of requests and rounds by hand: latencies, goodput, rates, cost, acceptance; intervals, noise of timings."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from scipy.stats import binom

from experiments.reporting.columns import FEW_PROMPTS
from experiments.reporting.run_tables import utilization_table
from experiments.results import metrics
from experiments.results.comparison import METHOD, entries_of, grids, paired_differences
from experiments.results.frame import Frame, frame_of, rounds_of
from experiments.results.limits import Limits, Terms, seconds_of
from experiments.results.records import PLAIN, Record, Source, sourced
from experiments.results.requests import concurrency, goodput, request_figures, spread
from experiments.results.rows import family, positions
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap, ratio_of_sums
from experiments.results.timing import lead, noise_of, stage_seconds, timed_calls, utilization_of
from specdec.types import Step
from tests.experiments.made_runs import loaded, moments, output, run_of

QUICK = Bootstrap(resamples=300)


def record(prompt: str, batch: int, emissions: tuple[tuple[float, int], ...], **more: Any) -> Record:
    """A request of 4 prompt tokens in a call of 10 s: admitted after 1 s, prefilled after 2."""
    fields = {"batch": batch, "prompt_tokens": 4, "seconds": 10.0} | moments(*emissions, admitted=1.0, prefilled=2.0)
    return output(prompt, **fields | more)


# In one call of 10 s: 5 tokens until 7 s (TPOT 1), 9 until 7 s (TPOT 0.5); in another, 1 token at 4 s (no TPOT).
RECORDS = [
    record("a", 0, ((3.0, 1), (5.0, 2), (7.0, 2))),
    record("b", 0, ((3.0, 1), (7.0, 8))),
    record("c", 1, ((4.0, 1),)),
]


def figures(records: list[Record] = RECORDS, terms: Terms = Terms()) -> dict[str, Any]:  # noqa: B008 (frozen)
    found = request_figures(records, terms, QUICK)
    assert found
    return found


def test_a_request_by_hand() -> None:
    row = frame_of([record("a", 0, ((3.0, 1), (4.0, 3), (6.0, 2)))]).iloc[0]
    assert (row.queue, row.ttft, row.engine_ttft, row.e2e) == (1.0, 3.0, 2.0, 6.0)
    assert row.tpot == 3 / 5
    assert row.chunk_gap == (1.0, 2.0)
    assert row.token_gap == (1 / 3, 1 / 3, 1 / 3, 1.0, 1.0)


def test_latencies_and_rates_by_hand() -> None:
    found = figures()
    assert (found["ttft.p50"], found["ttft.p99"], found["ttft.count"]) == (3.0, 4.0, 3)
    assert [found[f"tpot.{part}"] for part in ("p50", "p90", "count", "mean")] == [0.5, 1.0, 2, 0.75]
    assert (found["token_gap.count"], found["token_gap.p50"]) == (12, 0.5)  # four of 1, eight of 0.5
    assert (found["requests_per_second"], found["user_tokens_per_second"]) == (3 / 20, 2.0)
    assert (found["output_tokens_per_second"], found["total_tokens_per_second"]) == (15 / 20, (15 + 12) / 20)
    assert family(found, "phase_share") == {"queue": 3 / 18, "prefill": 3 / 18, "decode": 12 / 18}
    assert request_figures([replace(each, seconds=None) for each in RECORDS], Terms(), QUICK) == {}, "nothing was timed"
    silent = figures([replace(each, arrived=None) for each in RECORDS], Terms(limits=Limits(ttft=1.0)))
    assert not {"ttft.p50", "concurrency", "goodput"}.intersection(silent) and silent["requests"] == 3
    assert silent["output_tokens_per_second"] == 15 / 20, "an engine that tells no moments has rates alone"


def test_intervals_over_many_values_agree_with_the_plain_bootstrap() -> None:
    """More distinct values than are looked at: the ends are those of a loop, to the resolution of the points."""
    rng = np.random.default_rng(1)
    groups = {prompt: list(rng.exponential(size=30)) for prompt in range(40)}
    rows = [(prompt, value) for prompt, own in groups.items() for value in own]
    values = pandas.DataFrame(rows, columns=["prompt", "x"])
    found = spread(values, Bootstrap(resamples=3000))
    table = np.array(list(groups.values()))
    drawn = [table[rng.integers(40, size=40)].ravel() for _ in range(1000)]
    for level in (50, 90):
        interval = (found[f"p{level}_low"], found[f"p{level}_high"])
        expected = np.quantile([np.sort(each)[-(-level * each.size // 100) - 1] for each in drawn], [0.025, 0.975])
        assert interval == pytest.approx(expected, rel=0.06)
        assert interval[0] <= found[f"p{level}"] <= interval[1]


def test_goodput_counts_what_keeps_every_limit() -> None:
    """Three of ten requests are late: 70 % of the throughput is good."""

    def requests(*emissions: tuple[tuple[float, int], ...], **more: Any) -> pandas.DataFrame:
        told = {"admitted": 0.0, "prefilled": 0.1} | more
        return frame_of(record(str(n), 0, each, **told) for n, each in enumerate(emissions))

    good, late, slow, single = ((0.2, 1), (1.0, 4)), ((0.6, 1), (1.0, 4)), ((0.2, 1), (2.0, 4)), ((0.2, 1),)
    limits = Limits(ttft=0.5, tpot=0.25)
    for emissions, kept in ((good, 1), (late, 0), (slow, 0), (single, 1)):  # of one token, no further one is late
        assert goodput(requests(emissions), limits, arrived=1, seconds=1.0) == (kept, kept)
    assert goodput(requests(good, finish_reason="error"), limits, arrived=1, seconds=1.0)[0] == 0, "it never ended"
    assert [goodput(requests(good), Limits(e2e=most), arrived=1, seconds=1.0)[0] for most in (1.0, 0.99)] == [1, 0]
    found = goodput(requests(*[good] * 7, late, slow, late), limits, arrived=10, seconds=5.0)
    assert found == (1.4, 0.7) and str(limits) == "TTFT ≤ 500 ms, TPOT ≤ 250 ms"


@pytest.mark.parametrize("given", [0, "0ms", "fast", "5 parsecs", True, math.inf, "-3s", [], ""])
def test_durations_that_are_none(given: object) -> None:
    with pytest.raises(ValueError, match="seconds above 0"):
        seconds_of(given)


def test_cost_by_hand() -> None:
    """Two an hour: at 24 tokens/s a million tokens cost 23.15, at 766 they cost 0.725; 1.40 at 1,700 is 0.229."""
    for tokens, price, cost in ((24, 2.0, 23.15), (766, 2.0, 0.725), (1700, 1.4, 0.229)):
        found = figures([record("a", 0, ((1.0, tokens),), seconds=1.0)], Terms(price=price))
        assert found["price_per_million_tokens"] == pytest.approx(cost, abs=0.005 if cost > 1 else 0.0005)
        assert found["device_hours_per_million_tokens"] == pytest.approx(1e6 / 3600 / tokens)
    assert figures()["price_per_million_tokens"] is None


def test_the_time_of_calls_is_split_into_stages() -> None:
    stages = {"prefill": 1.0, "draft": 1.0, "verify": 5.0, "accept": 0.5, "commit": 0.5, "completion": 1.0}
    timed = [replace(each, stage_seconds={**stages, "ingestion": 0.5}) for each in RECORDS]
    split = stage_seconds(timed_calls(frame_of(timed), None))
    assert list(split) == ["ingestion", *stages, "other"]
    assert (split["ingestion"], split["verify"], split["other"]) == (1.0, 10.0, 1.0)
    assert sum(split.values()) == pytest.approx(20), "two calls of ten seconds"


def test_requests_in_flight_are_averages_over_all_calls() -> None:
    def request(batch: int, admitted: float, finished: float) -> Record:
        more = {"admitted": admitted, "prefilled": admitted, "seconds": 3.0}
        return record(f"{batch}{admitted}", batch, ((finished, 1),), **more)

    found = concurrency(frame_of([request(0, 0.0, 2.0), request(0, 1.0, 3.0), request(1, 0.0, 1.5)]))
    assert found == pytest.approx((5.5 / 6, 1 / 6))


def step(accepted: int, depth: int, *, nodes: int = 0, tokens: int = 0, **more: object) -> Step:
    drafted = {"accepted": accepted, "proposed_depth": depth, "proposed_nodes": nodes or depth}
    return Step(request=0, round=0, token_ids=tuple(range(tokens)), **drafted, **more)


of = metrics.of_steps
# Accepted 2 of 3, 0 of 3, 1 of 1 and nothing of nothing.
STEPS = [step(2, 3, nodes=7, tokens=3), step(0, 3, nodes=7, tokens=1), step(1, 1, tokens=2), step(0, 0, tokens=1)]


def test_rounds_by_hand() -> None:
    """Rounds that ended in an error decided nothing, also where the output goes on without the drafts at fault."""
    length = metrics.mean_acceptance_length(of(STEPS))
    assert length == pytest.approx((3 + 1 + 2 + 1) / 4)
    assert metrics.mean_acceptance_length(of([step(3, 3, tokens=2, finish_reason="stop")])) == 4
    failed, redone = step(3, 3, finish_reason="error"), step(0, 3, error="not finite")
    assert [metrics.mean_acceptance_length(of([*STEPS, each])) for each in (failed, redone)] == [length, length]
    assert metrics.acceptance_by_position(of([failed])) == {}
    # The rate is over depth, not nodes.
    assert metrics.draft_acceptance_rate(of(STEPS)) == pytest.approx(3 / 7)
    assert metrics.draft_acceptance_rate(of([step(0, 0)])) is None
    by = metrics.acceptance_by_position(of(STEPS))
    # Position 1 was drafted in three rounds and accepted in two; 2 and 3 were drafted in two rounds.
    assert positions(by, "rounds_at") == [3, 2, 2]
    assert positions(by) == pytest.approx([2 / 3, 1 / 2, 0.0])
    # Of the two rounds that drafted position 2, one had accepted position 1, and it accepted 2 as well.
    assert positions(by, "conditional_acceptance_at") == pytest.approx([2 / 3, 1.0, 0.0])
    # What a round's requests share counts once; a second round that took exactly as long is another one.
    shared = {"draft": 1.0, "verify": 2.0}
    steps = [step(0, 1, seconds=each) for each in (shared, shared, dict(shared) | {"commit": 0.5})]
    assert metrics.stage_seconds(steps) == {"draft": 2.0, "verify": 4.0, "commit": 0.5}


A, R, B, E, T = Source.ACCEPTED, Source.RECOVERED, Source.BONUS, Source.EITHER, Source.TARGET


@pytest.mark.parametrize(
    ("rounds", "leaf", "sources"),  # rounds: accepted, depth and nodes of what was drafted
    [
        ([(2, 2, 2), (0, 2, 2)], (), [A, A, B, R]),
        ([(0, 0, 0), (0, 0, 0)], (), [T, T]),
        ([(1, 2, 5)], (), [A, E]),
        ([(2, 2, 5)], (), [A, A, B]),
        ([(1, 2, 5), (1, 2, 5)], (True, False), [A, B, A, R]),
        ([(0, 0, 0)], (True,), [T]),
        ([(2, 3, 3), (3, 3, 3)], (), [A, A, R, A]),  # the last round may be cut
    ],
)
def test_a_token_has_its_source(rounds: list[tuple[int, int, int]], leaf: tuple[bool, ...], sources: list) -> None:
    accepted, depth, nodes = zip(*rounds, strict=True)
    found = sourced(output(tokens=len(sources), accepted=accepted, proposed_depth=depth, proposed_nodes=nodes), leaf)
    assert [(token.token, token.source) for token in found] == list(enumerate(sources))
    places = [(number, depth) for number, kept in enumerate(accepted) for depth in range(1, kept + 2)]
    assert [(token.round, token.depth) for token in found] == places[: len(sources)]


PEAKS = {"copy": 80.0, "read": 100.0, "flops": 1000.0, "cache_bytes": 0.0}
WORK = {
    "verify_bytes": 300.0, "verify_flops": 2000.0, "verify_forwards": 2.0, "useful_flops": 500.0,
    "verified": 8.0, "committed": 6.0,
}  # fmt: skip


def test_utilization_is_counted_by_hand() -> None:
    records = [output(method="plain", seconds=10.0, stage_seconds={"verify": 8.0, "prefill": 1.0}, work=WORK)]
    found = utilization_of(frame_of(records), PEAKS)
    # 300 bytes in 8 s of 100 bytes/s, 2000 operations of 1000/s; the least time is that of the bytes.
    assert (found["mbu.verify"], found["mfu.verify"]) == (pytest.approx(300 / 800), pytest.approx(2000 / 8000))
    assert found["of_least.verify"] == pytest.approx(8 / 3)
    assert found["useful_mfu"] == pytest.approx(500 / 8000) and found["wasted"] == pytest.approx(1 - 6 / 8)
    table = utilization_table(run_of(records, planned=1, series=1, peaks=PEAKS))
    assert table is not None
    assert [[cell.text for cell in row] for row in table.rows] == [["plain", "verify", "38%", "25%", "2.67"]]
    assert utilization_table(run_of(records, planned=1, series=1)) is None


def test_two_prompts_by_hand() -> None:
    # Resamples are both prompts (half of the time), or either one twice: lengths 2, 1.5 and 1.
    assert Bootstrap().interval(ratio_of_sums, [[20, 10], [10, 10]]) == (1, 2)
    # Student's quantile with one degree of freedom times the root of 2 leaves a normal tail of 0.28: the middle ones.
    assert Bootstrap(confidence=0.25).interval(ratio_of_sums, [[20, 10], [10, 10]]) == (1.5, 1.5)


@pytest.mark.parametrize(("prompts", "covered"), [(3, 0.74), (FEW_PROMPTS, 0.92)])
def test_coverage_of_few_prompts(prompts: int, covered: float) -> None:
    """Intervals of three prompts are too narrow, as tables say; percentiles alone would be at five, too (85 %)."""
    draw, quick, hits = np.random.default_rng(2), Bootstrap(resamples=2000), 0
    for _ in range(1000):
        low, high = quick.interval(np.mean, [draw.normal(size=prompts)]) or (0, 0)
        hits += low <= 0 <= high
    few, many = binom(1000, covered).ppf([1e-3, 1 - 1e-3])
    assert few <= hits <= many
    assert prompts != FEW_PROMPTS or few > binom(1000, 0.853).ppf(0.999)


IDLE = {"cores": 4, "own": 1.0, "others": 0.1}


def timed(batch: int, per_round: float, *, tokens: int = 50, **more: object) -> Record:
    """Ten rounds of so many seconds, and a prefill of 1 s."""
    fields = {"batch": batch, "prompt_tokens": tokens, "accepted": (0,) * 10, "seconds": 1 + 10 * per_round}
    fields |= {"prompt": f"p{batch}", "stage_seconds": {"prefill": 1.0}, "load": IDLE}
    return output(**{"method": PLAIN} | fields | more)


def noise(times: Sequence[float], load: Mapping[str, float] = IDLE) -> dict[str, Any]:
    return noise_of([timed(batch, time, load=load) for batch, time in enumerate(times)], PLAIN)


def test_the_spread_is_the_standard_deviation_over_the_median() -> None:
    chance = random.Random(0)
    # 400 draws: the estimate from quartiles is off by more than 15 % with odds of about 1 in 100; seeded.
    found = noise([chance.gauss(0.1, 0.02) for _ in range(400)])
    assert found["noise_spread"] == pytest.approx(0.2, rel=0.15) and found["noisy"]
    # The mutant: a tenth of that is within the limit.
    assert not noise([chance.gauss(0.1, 0.002) for _ in range(400)])["noisy"]


def test_what_the_length_explains_is_no_noise() -> None:
    """A round takes longer after a longer prompt: 0.1 s at 100 tokens, 0.4 s at 1600."""
    lengths = [100, 400, 700, 1000, 1300, 1600]
    records = [timed(n, 0.1 + 0.0002 * (size - 100), tokens=size) for n, size in enumerate(lengths)]
    assert noise_of(records, PLAIN)["noise_spread"] == pytest.approx(0, abs=1e-9)
    # The mutant: the same times at one length are noise.
    alike = [timed(n, 0.1 + 0.0002 * (size - 100)) for n, size in enumerate(lengths)]
    assert noise_of(alike, PLAIN)["noisy"]


def test_the_load_of_other_processes_is_a_mean_over_time_and_counts_a_batch_once() -> None:
    cases = {(4, 1.0, 0.3): False, (4, 1.0, 1.5): False, (4, 2.0, 1.5): True, (2, 1.0, 0.9): True}
    for (cores, own, others), noisy in cases.items():  # by a tenth of the cores, unless more than a quarter is idle
        assert noise([0.1] * 5, load={"cores": cores, "own": own, "others": others})["noisy"] is noisy
    slow = {"cores": 4, "own": 1.0, "others": 3.0}
    below = {"cores": 4, "own": 1.0, "others": -0.2}  # of a short time, as the system counts in steps
    records = [timed(0, 0.9, load=slow), timed(0, 0.9, prompt="other", load=slow), timed(1, 0.0, load=below)]
    assert noise_of(records, PLAIN)["other_cores"] == pytest.approx((10 * 3.0 - 1 * 0.2) / 11)


def drafted(folder: Path, *overrides: str, method: str = "model", accepted: int = 2) -> Run:
    """A run whose drafter accepts one token more on every second prompt, which are of a category of their own."""
    records = []
    for number in range(4):
        shared: dict[str, Any] = {"category": "odd" if number % 2 else "even", "batch": number}
        records.append(output(f"p{number}", "plain", **shared))
        drafts = {"accepted": (accepted + number % 2, 0), "proposed_depth": (4, 4)}
        records.append(output(f"p{number}", method, **drafts, **shared))
    return loaded(folder, *overrides, prompts=4, records=records)


def test_two_drafters_by_hand_and_by_category(tmp_path: Path) -> None:
    made = enumerate((name, k) for name in ("model", "two") for k in (2, 4))
    runs = [drafted(tmp_path / f"{n}", f"drafter={name}", f"k={k}", method=name, accepted=n) for n, (name, k) in made]
    rows = entries_of(runs)
    setting, found = paired_differences(rows)
    assert setting == "drafter"
    assert [(each["k"], each["category"], (each["reference"], each["compared"])) for each in found] == [
        (k, category, ("model", "two")) for k in "24" for category in ("all", "even", "odd")
    ]
    # Two rounds of each prompt: two tokens more in one of them is one token per round, on every prompt alike.
    for each in found:
        assert [each[name] for name in ("difference", "difference_low", "difference_high")] == pytest.approx([1] * 3)
        assert each["prompts"] == (4 if each["category"] == "all" else 2)
    assert (found[0]["length"], found[0]["reference_length"]) == pytest.approx((2.25, 1.25))
    assert {(grid.down, grid.rows) for grid in grids(rows, by_category=True)} == {("category", ("even", "odd"))}
    assert paired_differences(rows, "k")[0] == "k"
    with pytest.raises(ValueError, match=r"difference='size': the runs do not differ in it, choose among .*k"):
        paired_differences(rows, "size")


def test_two_runs_are_compared_whatever_they_differ_in_and_other_prompts_never(tmp_path: Path) -> None:
    first, second = (drafted(tmp_path / name, f"a={name}", f"b={name}") for name in "xy")
    setting, found = paired_differences(entries_of([first, second]))
    assert setting == METHOD and [each["difference"] for each in found if each["category"] == "all"] == [0]
    other = replace(second, manifest=second.manifest | {"prompts_hash": "other"})
    assert paired_differences(entries_of([first, other]))[1] == []


def accepted(draw: np.random.Generator, name: str, ease: np.ndarray) -> Frame:
    """Sixty rounds of four drafted tokens on every prompt, each accepted with the prompt's ease, roughly."""
    chances = np.clip(ease + draw.normal(0, 0.03, 30), 0, 1)
    counts = (tuple(draw.binomial(4, chance, 60).tolist()) for chance in chances)
    return frame_of(
        output(f"p{prompt}", name, accepted=each, proposed_depth=(4,) * 60) for prompt, each in enumerate(counts)
    )


def test_intervals_over_prompts_hold_the_truth_and_pairing_narrows_them() -> None:
    """Two drafters on 30 prompts, which differ among each other by far more than the drafters on each.

    A drafted token is accepted with a chance of 0.2 to 0.8, by prompt; the other drafter's chance is 0.1 larger. An
    honest interval misses the truth in about 7 of 100: more than 8 in 40, 1 time in 2,000. The mutants resample rounds
    as if each had a prompt of its own, and take the other drafter's prompts in another order.
    """
    hits = {"prompts": 0, "rounds": 0, "pairs": 0}
    for seed in range(40):
        draw = np.random.default_rng(seed)
        ease = draw.uniform(0.2, 0.8, 30)
        two, one = accepted(draw, "two", ease + 0.1), accepted(draw, "one", ease)
        rounds = rounds_of(one)
        for name, prompts in (("prompts", rounds.prompt), ("rounds", pandas.Series(range(len(rounds))))):
            columns = [1 + rounds.accepted, np.ones(len(rounds))]
            low, high = QUICK.over_prompts(ratio_of_sums, prompts, columns) or (0, 0)
            hits[name] += low <= 1 + 4 * 0.5 <= high
        other = one.assign(prompt=draw.permutation(one.prompt))
        paired, mixed = (
            lead("mean_acceptance_length", ({}, two, None), ({}, each, None), QUICK) for each in (one, other)
        )
        assert paired is not None and mixed is not None and paired.prompts == 30
        assert mixed.difference == pytest.approx(paired.difference)
        hits["pairs"] += paired.interval[0] <= 4 * 0.1 <= paired.interval[1]
        assert np.ptp(paired.interval) < 0.6 * np.ptp(mixed.interval), "worth more than half of the width"
    assert min(hits["prompts"], hits["pairs"]) >= 40 - 8 > hits["rounds"]
