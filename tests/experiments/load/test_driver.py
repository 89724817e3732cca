"""Who is submitted when, on a test's own clock, the figures of that by hand, and the report that is made of them."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from experiments.load.arrivals import Arrivals, Gaps, Times
from experiments.load.driver import Driver, Overload, RealEngine
from experiments.load.figures import LATE, figures_of, knee, latencies, warnings_of
from experiments.load.run import CLOSED, DONE, DROPPED, FAILED, OPEN, UNFINISHED, LoadRun
from experiments.load.workloads import Asked, Planned
from experiments.reporting.load import LoadReport, load_tables, report_load
from experiments.results.limits import Limits, Terms
from experiments.results.statistics import Bootstrap
from specdec import SamplingParams, Step
from specdec.cache.pages import PageCounts

BOOTSTRAP = Bootstrap(resamples=100)
LIMITS = Terms(limits=Limits(ttft=3.5, tpot=1.0))


Rounds = Callable[[int], Sequence[tuple[float, int]]]


class OneServer:
    """Serves in the order of arrival: a turn is a round of the first request, as many (seconds, tokens) as it has.

    A round of no token is Ctrl-C. It is the clock, too: seconds pass when it serves, and when somebody sleeps, each
    time ``late`` longer than asked.
    """

    max_batch_size, page_counts = 1, PageCounts()

    def __init__(self, rounds: Rounds, late: float):
        self.now, self.late, self._rounds = 100.0, late, rounds
        self.queue: dict[int, list[tuple[float, int]]] = {}
        self.entered: dict[int, float] = {}
        self.aborted: list[int] = []

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-9) + self.late  # a sleep too short to count would never end

    @property
    def unfinished(self) -> int:
        return len(self.queue)

    def submit(self, prompt: Any, sampling: SamplingParams, *, speculate: bool, arrived: float) -> int:
        assert sampling.stream is not None and arrived <= self.now
        self.queue[sampling.stream] = list(self._rounds(sampling.stream))
        return sampling.stream

    def step(self) -> list[Step]:
        request, left = next(iter(self.queue.items()))
        entered = self.entered.setdefault(request, self.now)
        seconds, tokens = left.pop(0)
        if not tokens:
            raise KeyboardInterrupt
        self.now += seconds
        if not left:
            del self.queue[request]
        known: Any = {"request": request, "round": 0, "proposed_nodes": 4, "proposed_depth": 4, "accepted": tokens - 1}
        known |= {"elapsed": self.now - entered, "visible": self.now}
        return [Step(token_ids=(1,) * tokens, finish_reason=None if left else "length", **known)]

    def abort(self, request_id: int) -> None:
        del self.queue[request_id]
        self.aborted.append(request_id)


def requests(count: int, klass: Callable[[int], str] = lambda number: "any") -> list[Asked]:
    planned = [Planned(klass=klass(number), pieces=((number, 10),), output_tokens=4) for number in range(count)]
    return [Asked(one, (1,) * 10, SamplingParams(stream=number)) for number, one in enumerate(planned)]


def made(times: Times | Sequence[float], rounds: Rounds, late: float = 0.0, **more: Any) -> tuple[Driver, OneServer]:
    server = OneServer(rounds, late)
    engine = RealEngine(server, clock=lambda: server.now, sleep=server.sleep)
    given: Any = {"asked": requests(len(times)), "times": np.asarray(times, dtype=np.float64), "loop": OPEN} | more
    return Driver(engine, **given), server


def driven(times: Times | Sequence[float], rounds: Rounds, method: str = "m", rate=1.0, **more: Any) -> LoadRun:
    driver, _ = made(times, rounds, **more)
    driver.run()
    return driver.result(method=method, rate=rate, slots=1)


@pytest.mark.parametrize(("exponential", "expected", "tolerance"), [(False, 0.5, 0.1), (True, 1.0, 0.12)])
def test_queues_of_the_textbook(exponential: bool, expected: float, tolerance: float) -> None:
    """M/D/1: s ρ / (2 (1 - ρ)); M/M/1: s ρ / (1 - ρ). Arrivals in step wait less, slower service more."""

    def wait(arrivals: Arrivals, count: int, more: float = 0.0) -> float:
        rng = np.random.default_rng(3)
        times = arrivals.times(rng, count)
        seconds = more + (rng.exponential(1.0, count) if exponential else np.ones(count))
        return float(latencies(driven(times, lambda number: [(float(seconds[number]), 1)])).queue.mean())

    half, few = Gaps(rate=0.5), 2000
    assert wait(half, 8000) == pytest.approx(expected, rel=tolerance)
    assert wait(replace(half, cv=0), few) < (1 - 2 * tolerance) * expected
    assert wait(half, few, more=0.5) > 2 * expected


def test_moments_of_requests_one_by_one() -> None:
    """The second comes during the first one's turn, and the third to an idle engine."""
    run = driven([1.0, 2.0, 10.0], lambda number: [(3.0, 1), (2.0, 3)][: 2 if number < 2 else 1])
    moments = run.requests[["arrived", "admitted", "first_token", "finished"]].to_numpy().tolist()
    np.testing.assert_allclose(moments, [[1, 1, 4, 6], [2, 6, 9, 11], [10, 11, 14, 14]], atol=1e-6)
    told = run.requests[["outcome", "output_tokens", "rounds", "accepted"]].to_numpy().tolist()
    assert told == [[DONE, 4, 2, 2], [DONE, 4, 2, 2], [DONE, 1, 1, 0]] and run.facts["complete"]
    assert run.seconds == pytest.approx(14) and run.late == pytest.approx(0, abs=1e-9), "waiting for a turn is not late"
    assert run.turns.running.tolist() == [1] * 5 and run.turns.waiting.tolist() == [0, 1, 0, 0, 0]
    found = latencies(run)[["queue", "ttft", "tpot", "e2e"]].to_numpy().tolist()
    np.testing.assert_allclose(found, [[0, 3, 2 / 3, 5], [4, 7, 2 / 3, 9], [1, 4, np.nan, 4]], atol=1e-6)
    over_time = figures(run)
    assert (over_time.running, over_time.waiting, over_time.unused) == pytest.approx((13 / 14, 2 / 14, 1 / 14))


def test_a_user_asks_again_after_the_answer_and_some_thought() -> None:
    run = driven([0.0] * 3 + [0.5] * 9, lambda number: [(1.0, 1)], loop=CLOSED, users=3)
    arrived, finished = run.requests.arrived.to_numpy(), run.requests.finished.to_numpy()
    np.testing.assert_allclose(np.sort(arrived), [0, 0, 0, *np.sort(finished)[:9] + 0.5])
    inside = [(run.requests.arrived <= at).sum() - (run.requests.finished < at).sum() for at in arrived]
    assert max(inside) <= 3 and run.loop == CLOSED and len(run.requests) == 12


@pytest.mark.parametrize(
    ("overload", "outcomes"),
    [
        (Overload(waiting=1), [DONE, DONE, DROPPED, DROPPED]),
        (Overload(patience=8.5), [DONE, DROPPED, DONE, DROPPED]),
    ],
)
def test_what_is_dropped(overload: Overload, outcomes: list[str]) -> None:
    """All come while the first one is served for 10 s; the third one is as patient as it waits when its turn comes."""
    run = driven([0, 1, 2, 9], lambda number: [(10.0, 1)], overload=overload)
    assert run.requests.outcome.tolist() == outcomes
    lost = run.requests[run.requests.outcome == DROPPED]
    assert (lost.output_tokens == 0).all() and lost.finished.notna().all()
    assert run.requests.reason.astype(bool).tolist() == [each == DROPPED for each in outcomes]
    closed = driven([0.0] * 6, lambda number: [(2.0, 1)], loop=CLOSED, users=3, overload=overload)
    assert len(closed.requests) == 6 and closed.facts["complete"], "a user asks again after a request that was dropped"


@pytest.mark.parametrize(("late", "warned"), [(0.004, False), (0.02, True)])
def test_a_generator_that_is_late_says_so(late: float, warned: bool) -> None:
    run = driven(np.arange(1, 40) * 0.5, lambda number: [(0.01, 1)], late=late)
    assert run.late == pytest.approx(late, abs=1e-9) and (late > LATE) == warned
    assert any(text.startswith("LATE") for text in warnings_of(run)) == warned


def test_an_interruption_keeps_what_was_seen_and_lets_the_others_go() -> None:
    driver, server = made(np.arange(9.0), lambda number: [(1.0, 1), (1.0, 0 if number else 2)])
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    run = driver.result(method="m", rate=1.0)
    assert run.requests.outcome.tolist() == [DONE, UNFINISHED, UNFINISHED, UNFINISHED], "those that had arrived"
    assert run.requests.output_tokens.tolist() == [3, 1, 0, 0] and server.aborted == [1, 2, 3] and not server.queue
    assert not run.facts["complete"] and run.facts["planned"] == 9 and run.seconds == 3.0


def figures(run: LoadRun) -> Any:
    return figures_of([run], LIMITS, BOOTSTRAP).iloc[0]


def test_dropped_failed_and_unfinished_requests_are_missed_and_in_no_latency() -> None:
    """Goodput of ten, 5 s apart, that take 1 s each, with preemptions and what was swapped beside it."""
    run = driven(5.0 * np.arange(10), lambda number: [(1.0, 1)])
    for number, outcome in enumerate((DROPPED, FAILED, UNFINISHED)):
        run.requests.loc[number, "outcome"] = outcome
    totals = replace(run.totals, swapped_out=120, swap_seconds=0.25, preempted=3, recomputed=40)
    frame = run.requests.assign(preemptions=[3, *[0] * 9], recomputed_tokens=[40, *[0] * 9])
    found = figures(replace(run, totals=totals, requests=frame))
    assert (found.done, found.dropped, found.failed, found.unfinished, found.arrived) == (7, 1, 1, 1, 10)
    assert found.goodput == found.requests_per_second == pytest.approx(7 / 46)
    assert found.attained == 0.7 and found["ttft.p99"] == pytest.approx(1.0)
    assert found.output_tokens_per_second == pytest.approx(7 / run.seconds) and found.dropped_tokens == 3
    assert (found.swapped_tokens, found.swap_seconds) == (120, 0.25)
    report = LoadReport(folder=Path(), terms=LIMITS, bootstrap=BOOTSTRAP, title="T")
    cells = [cell.text for cell in load_tables([found.to_dict()], report)[1].rows[0]]
    assert {"3; 40", "120", "250"} <= set(cells)


def test_classes_are_told_apart() -> None:
    asked = requests(10, lambda number: "even" if number % 2 == 0 else "odd")
    run = driven(5.0 * np.arange(10), lambda number: [(1.0 if number % 2 == 0 else 4.0, 1)], asked=asked)
    found = figures_of([run], LIMITS, BOOTSTRAP).set_index("group")
    assert found[["arrived", "attained"]].to_numpy().tolist() == [[10, 0.5], [5, 1.0], [5, 0.0]]
    assert found.index.tolist() == ["all", "even", "odd"] and found.loc["odd", "ttft.p50"] == pytest.approx(4.0)


def test_the_knee_is_the_highest_rate_below_which_limits_are_kept() -> None:
    def at(shares: dict[float, float | None], least: float = 0.9) -> float | None:
        return knee(pandas.DataFrame(shares.items(), columns=["rate", "attained"]), least)

    assert at({4: 0.95, 1: 1.0, 2: 0.92}) == 4
    assert at({1: 1.0, 2: 0.5, 4: 1.0}) == 1, "what comes behind a miss does not count"
    assert at({1: 0.95}, 0.99) is at({1: None}) is None


def loads(*rates: float) -> list[LoadRun]:
    """Two methods, the second one half as fast."""
    found, asked = [], requests(30, lambda number: "short" if number % 3 else "long")
    for rate, (method, seconds) in itertools.product(rates, (("plain", 0.2), ("m: a | long name", 0.4))):
        times, rounds = Gaps(rate=rate).times(np.random.default_rng(0), 30), [(seconds / 2, 1), (seconds / 2, 3)]
        found.append(driven(times, lambda _, own=rounds: own, method=method, rate=rate, asked=asked))
    return found


def test_a_report_has_its_pictures_and_tables(tmp_path: Path) -> None:
    terms = Terms(limits=Limits(ttft=0.5, tpot=0.1))
    report = LoadReport(folder=tmp_path, terms=terms, bootstrap=BOOTSTRAP, title="T", notes=["A note."], spare=0.5)
    found, written = report_load(loads(1.0, 4.0), report)
    assert {"load.md", "load.png"} < {path.name for path in written}
    assert all(path.stat().st_size > 500 for path in written)
    text = (tmp_path / "load.md").read_text()
    assert text.count("open loop: ") == text.count("## ") == 4, "under every table"
    assert all(part in text for part in ("TTFT ≤ 500 ms, TPOT ≤ 100 ms", "A note.", "of slots and time were unused"))
    assert "highest rate up to which 90% of requests keep all limits" in text
    kept = json.loads((tmp_path / "load.json").read_text())["runs"]
    assert kept[0]["ttft.p50"] == pytest.approx(found["ttft.p50"][0])
    halves = [row["times_tokens"] for row in kept if row.get("times_tokens") is not None]
    assert halves == pytest.approx([0.5, 0.5]), "the other method is half as fast"
