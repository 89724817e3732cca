"""Figures of requests and of rounds, by hand: latencies, goodput, rates, cost; acceptance, sources, utilization."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas
import pytest

from experiments.reporting.run_tables import utilization_table
from experiments.results import metrics
from experiments.results.frame import frame_of
from experiments.results.limits import Limits, Terms, seconds_of
from experiments.results.records import Record, Source, sourced
from experiments.results.requests import concurrency, goodput, request_figures, spread
from experiments.results.rows import family, positions
from experiments.results.statistics import Bootstrap
from experiments.results.timing import stage_seconds, timed_calls, utilization_of
from specdec.types import Step
from tests.experiments.made_runs import run_of
from tests.experiments.results.outputs import moments, output

QUICK = Bootstrap(resamples=200)


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
