"""Figures of requests over records, by hand: percentiles, goodput, rates, cost, shares, Little's law."""

import math
from dataclasses import replace

import numpy as np
import pytest

from experiments.results.records import Record
from experiments.results.requests.concurrency import concurrency, curve
from experiments.results.requests.cost import (
    LEAST_SECONDS,
    device_hours_per_million,
    joules_per_token,
    price_per_million,
)
from experiments.results.requests.figures import RequestFigures, Terms, request_figures
from experiments.results.requests.limits import Limits, goodput, seconds_of
from experiments.results.requests.spread import percentile, spreads
from experiments.results.requests.timeline import Timeline
from experiments.results.statistics import Bootstrap

QUICK = Bootstrap(resamples=200)


def record(prompt: str, batch: int, emissions: tuple[tuple[float, int], ...], **more: object) -> Record:
    """A request of 4 prompt tokens in a call of 10 s: admitted after 1 s, prefilled after 2."""
    fields: dict[str, object] = {
        "prompt": prompt,
        "method": "fast",
        "temperature": 0.0,
        "batch": batch,
        "prompt_tokens": 4,
        "token_ids": tuple(range(sum(count for _, count in emissions))),
        "finish_reason": "length",
        "seconds": 10.0,
        "arrived": 0.0,
        "admitted": 1.0,
        "prefilled": 2.0,
        "finished": emissions[-1][0] if emissions else None,
        "emitted_at": tuple(moment for moment, _ in emissions),
        "emitted": tuple(count for _, count in emissions),
    }
    return Record(**fields | more)  # type: ignore[arg-type]


# In one call of 10 s: 5 tokens until 7 s (TPOT 1), 9 until 7 s (TPOT 0.5); in another, 1 token at 4 s (no TPOT).
RECORDS = [
    record("a", 0, ((3.0, 1), (5.0, 2), (7.0, 2))),
    record("b", 0, ((3.0, 1), (7.0, 8))),
    record("c", 1, ((4.0, 1),)),
]


def figures(records: list[Record] = RECORDS, terms: Terms = Terms()) -> RequestFigures:  # noqa: B008 (frozen)
    found = request_figures(records, terms, QUICK)
    assert found is not None
    return found


def test_latencies_and_rates_by_hand() -> None:
    found = figures()
    assert found.ttft is not None and found.tpot is not None and found.e2e is not None
    assert (found.ttft.p50, found.ttft.p99, found.ttft.count) == (3.0, 4.0, 3)
    assert (found.tpot.p50, found.tpot.p90, found.tpot.count, found.tpot.mean) == (0.5, 1.0, 2, 0.75)
    assert (found.e2e.p50, found.e2e.mean) == (7.0, 6.0)
    assert found.chunk_gap is not None and found.token_gap is not None
    assert sorted([found.chunk_gap.p50, found.chunk_gap.p99]) == [2.0, 4.0]  # gaps 2, 2, 4
    assert (found.token_gap.count, found.token_gap.p50) == (12, 0.5)  # four of 1, eight of 0.5
    assert found.seconds == 20.0
    assert found.requests_per_second == 3 / 20
    assert found.output_tokens_per_second == 15 / 20
    assert found.total_tokens_per_second == (15 + 12) / 20
    assert found.user_tokens_per_second == 2.0
    assert found.phase_shares == {"queue": 3 / 18, "prefill": 3 / 18, "decode": 12 / 18}
    assert found.warning is None


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile(np.array([4.0, 2.0, 1.0, 3.0]), level) for level in (50, 75, 76, 99)] == [2, 3, 4, 4]
    hundred = np.arange(1, 101)
    assert [percentile(hundred, level) for level in (50, 90, 95, 99)] == [50, 90, 95, 99]


def test_prompts_are_drawn_again_with_all_that_is_theirs() -> None:
    """Every prompt has one value, a thousand times. As if values were independent, the interval would be a point."""
    groups = {prompt: [float(prompt)] * 1000 for prompt in range(9)}
    found = spreads({"x": groups}, Bootstrap(resamples=2000))["x"]
    assert found is not None and found.p50_interval is not None
    assert found.p50 == 4.0
    # The median of nine draws is at most 2 with probability P(Bin(9, 1/3) >= 5) = 0.145: more than one in forty.
    assert found.p50_interval[0] <= 2 and found.p50_interval[1] >= 6


def test_intervals_over_many_values_agree_with_the_plain_bootstrap() -> None:
    """More distinct values than are looked at: the ends are those of a loop, to the resolution of the points."""
    rng = np.random.default_rng(1)
    groups = {prompt: list(rng.exponential(size=30)) for prompt in range(40)}
    found = spreads({"x": groups}, Bootstrap(resamples=3000))["x"]
    assert found is not None and found.p50_interval is not None and found.p90_interval is not None
    table = np.array(list(groups.values()))
    drawn = [table[rng.integers(40, size=40)].ravel() for _ in range(1000)]
    for level, interval in ((50, found.p50_interval), (90, found.p90_interval)):
        expected = np.quantile([percentile(each, level) for each in drawn], [0.025, 0.975])
        assert interval == pytest.approx(expected, rel=0.06)
        assert interval[0] <= getattr(found, f"p{level}") <= interval[1]


def test_one_prompt_has_no_interval_and_no_value_no_figure() -> None:
    found = spreads({"x": {"a": [1.0, 2.0]}, "y": {"a": []}}, QUICK)
    assert found["y"] is None
    assert found["x"] is not None and found["x"].p50_interval is None


def test_goodput_counts_what_keeps_every_limit() -> None:
    """Three of ten requests are late: 70 % of the throughput is good."""
    good = Timeline(arrived=0.0, admitted=0.0, prefilled=0.1, emissions=((0.2, 1), (1.0, 4)), finished=1.0)
    late = replace(good, emissions=((0.6, 1), (1.0, 4)))
    slow = replace(good, emissions=((0.2, 1), (2.0, 4)), finished=2.0)
    single = replace(good, emissions=((0.2, 1),), finished=0.2)  # no further token, so none was late
    unfinished = replace(good, finished=None)
    limits = Limits(ttft=0.5, tpot=0.25)
    assert [limits.met_by(each) for each in (good, late, slow, single, unfinished)] == [True, False, False, True, False]
    assert Limits(e2e=1.0).met_by(good)
    assert not Limits(e2e=0.99).met_by(good)
    found = goodput([good] * 7 + [late, slow, unfinished], limits, arrived=10, seconds=5.0)
    assert (found.good, found.attainment, found.per_second) == (7, 0.7, 1.4)
    assert found.limits == "TTFT ≤ 500 ms, TPOT ≤ 250 ms"


def test_failed_requests_count_as_missed_and_in_no_latency() -> None:
    failed = record("d", 1, (), finish_reason="error", error="NaN")
    terms = Terms(limits=Limits(ttft=3.5), price=2.0)
    found = figures([*RECORDS, failed], terms)
    assert found.goodput is not None
    assert (found.goodput.good, found.goodput.arrived, found.goodput.attainment) == (2, 4, 0.5)
    assert found.requests == 3
    assert found.ttft == figures(terms=terms).ttft


@pytest.mark.parametrize(
    ("given", "seconds"), [(2, 2.0), (0.25, 0.25), ("200ms", 0.2), ("1.5 s", 1.5), ("2min", 120.0), ("300us", 3e-4)]
)
def test_durations(given: object, seconds: float) -> None:
    assert seconds_of(given) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("given", [0, -1, "0ms", "fast", "5 parsecs", True, math.inf, "-3s", [], ""])
def test_durations_that_are_none(given: object) -> None:
    with pytest.raises(ValueError, match="give seconds above 0"):
        seconds_of(given)


def test_cost_by_hand() -> None:
    """Two an hour: at 24 tokens/s a million tokens cost 23.15, at 766 they cost 0.725; 1.40 at 1,700 is 0.229."""
    assert price_per_million(24, 2.0) == pytest.approx(23.15, abs=0.005)
    assert price_per_million(766, 2.0) == pytest.approx(0.725, abs=0.0005)
    assert price_per_million(1700, 1.40) == pytest.approx(0.229, abs=0.0005)
    assert device_hours_per_million(1e6 / 3600) == pytest.approx(1.0)
    assert (price_per_million(None, 2.0), price_per_million(24, None)) == (None, None)


def test_energy_is_told_of_long_measurements_alone() -> None:
    assert joules_per_token(50.0, 100, LEAST_SECONDS) == 0.5
    assert joules_per_token(50.0, 100, LEAST_SECONDS - 0.1) is None
    assert joules_per_token(None, 100, 60.0) is None
    measured = [replace(each, joules=30.0) for each in RECORDS]
    assert figures(measured).joules_per_token == 60 / 15  # two calls: what a call used counts once
    assert figures([*measured[:2], RECORDS[2]]).joules_per_token is None


def test_stages_are_shares_of_the_calls_and_of_the_ingestion_before_them() -> None:
    stages = {"prefill": 1.0, "draft": 1.0, "verify": 5.0, "accept": 0.5, "commit": 0.5, "completion": 1.0}
    timed = [replace(each, stage_seconds={**stages, "ingestion": 0.5}, ingestion=0.25) for each in RECORDS]
    shares = figures(timed).stage_shares
    whole = 20 + 3 * 0.25
    assert list(shares) == ["ingestion", *stages, "other"]
    assert shares["ingestion"] == pytest.approx((2 * 0.5 + 3 * 0.25) / whole)
    assert shares["verify"] == pytest.approx(10 / whole)
    assert shares["other"] == pytest.approx(2 * 0.5 / whole)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert figures().stage_shares == {}  # not timed


def test_requests_in_flight_over_time() -> None:
    assert curve([(0.0, 2.0), (1.0, 3.0)]) == [(0.0, 1), (1.0, 2), (2.0, 1), (3.0, 0)]
    found = figures().concurrency
    assert found is not None
    # In slots: 6 + 6 + 3 s of 20; in the queue: three times 1 s. The law: 3/20 requests/s, 6 s each in the mean.
    assert (found.running, found.waiting) == (pytest.approx(15 / 20), pytest.approx(3 / 20))
    assert found.expected == pytest.approx(3 / 20 * 6.0)
    assert found.holds


def test_the_series_over_time_is_the_average_in_parts() -> None:
    def line(admitted: float, finished: float) -> Timeline:
        return Timeline(
            arrived=0.0, admitted=admitted, prefilled=admitted, emissions=((finished, 1),), finished=finished
        )

    found = concurrency([([line(0.0, 2.0), line(1.0, 3.0)], 3.0), ([line(0.0, 1.5)], 3.0)])
    assert found is not None and found.seconds == 6.0
    assert found.running_over_time == (1.0,) * 10 + (2.0,) * 10 + (1.0,) * 10 + (1.0,) * 15 + (0.0,) * 15
    assert found.waiting_over_time == (1.0,) * 10 + (0.0,) * 50
    assert (found.running, found.waiting) == (pytest.approx(5.5 / 6), pytest.approx(1 / 6))
    assert found.holds


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"arrived": -2.0}, "Little's law expects"),  # before the call began
        ({"emitted_at": (4.0,), "finished": 14.0, "seconds": 10.0}, "Little's law expects"),  # after it ended
        ({"admitted": 5.0}, "moments of 1 of 3 requests are in an impossible order"),
    ],
)
def test_broken_timestamps_are_said(broken: dict[str, object], words: str) -> None:
    found = figures([*RECORDS[:2], replace(RECORDS[2], **broken)])  # type: ignore[arg-type]
    assert found.warning is not None
    assert words in found.warning


def test_nothing_timed_has_no_figures_and_silent_engines_have_rates_alone() -> None:
    assert request_figures([replace(each, seconds=None) for each in RECORDS], Terms(), QUICK) is None
    silent = figures([replace(each, arrived=None) for each in RECORDS], Terms(limits=Limits(ttft=1.0)))
    assert (silent.ttft, silent.concurrency, silent.goodput, silent.requests) == (None, None, None, 3)
    assert silent.output_tokens_per_second == 15 / 20
    assert concurrency([]) is None


def test_terms_of_older_runs_are_none() -> None:
    assert Terms.of({}) == Terms()
    assert Terms.of({"sla": {"ttft": "200ms", "tpot": None}, "price": 2}) == Terms(limits=Limits(ttft=0.2), price=2)
