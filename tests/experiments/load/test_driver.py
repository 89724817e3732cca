"""Who is submitted when, on a test's own clock: queues of the textbook, closed loops, overload, interruptions."""

import numpy as np
import pytest

from experiments.load.arrivals import Arrivals, Gaps
from experiments.load.driver import Driver, Overload, RealEngine
from experiments.load.figures import LATE, figures_of, latencies, warnings_of
from experiments.load.run import CLOSED, DONE, DROPPED, FAILED, OPEN, UNFINISHED, LoadRun
from experiments.results.limits import Terms
from experiments.results.statistics import Bootstrap
from specdec.types import Step
from tests.experiments.load.one_server import Clock, OneServer, driven, requests


def mean_wait(arrivals: Arrivals, count: int, *, exponential: bool, more: float = 0.0) -> float:
    rng = np.random.default_rng(3)
    times = arrivals.times(rng, count)
    seconds = more + (rng.exponential(1.0, count) if exponential else np.ones(count))
    run = driven(times, lambda number: [(float(seconds[number]), 1)])
    return float(latencies(run).queue.mean())


@pytest.mark.parametrize(
    ("load", "exponential", "expected", "count", "tolerance"),
    [
        (0.5, False, 0.5, 16_000, 0.1),
        (0.5, True, 1.0, 12_000, 0.12),
        pytest.param(0.9, False, 4.5, 60_000, 0.12, marks=pytest.mark.full),
        pytest.param(0.9, True, 9.0, 120_000, 0.15, marks=pytest.mark.full),
    ],
)
def test_queues_of_the_textbook(load: float, exponential: bool, expected: float, count: int, tolerance: float) -> None:
    """M/D/1: s ρ / (2 (1 - ρ)); M/M/1: s ρ / (1 - ρ). Arrivals in step wait less, slower service more."""
    assert mean_wait(Gaps(rate=load), count, exponential=exponential) == pytest.approx(expected, rel=tolerance)
    assert mean_wait(Gaps(rate=load, cv=0), count, exponential=exponential) < (1 - 2 * tolerance) * expected
    assert load > 0.8 or mean_wait(Gaps(rate=load), count, exponential=exponential, more=0.5) > 2 * expected


def moments(run: LoadRun, *names: str) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in run.requests[list(names)].to_numpy().tolist()]


def test_moments_of_requests_one_by_one() -> None:
    """The second comes during the first one's turn, and the third to an idle engine."""
    run = driven([1.0, 2.0, 10.0], lambda number: [(3.0, 1), (2.0, 3)])
    assert moments(run, "arrived", "submitted", "admitted", "first_token", "finished") == [
        [1, 1, 1, 4, 6],
        [2, 4, 6, 9, 11],
        [10, 11, 11, 14, 16],
    ]
    assert run.requests[["outcome", "output_tokens", "rounds", "accepted"]].to_numpy().tolist() == [[DONE, 4, 2, 2]] * 3
    assert run.seconds == pytest.approx(16) and run.late == pytest.approx(0, abs=1e-9), "waiting for a turn is not late"
    assert run.turns.running.tolist() == [1] * 6 and run.turns.waiting.tolist() == [0, 1, 0, 0, 0, 0]
    assert run.facts["complete"] and run.turns.committed.sum() == 12


@pytest.mark.parametrize("users", [1, 3])
def test_a_user_asks_again_after_the_answer_and_some_thought(users: int) -> None:
    thinks = [0.0] * users + [0.5] * 9
    run = driven(thinks, lambda number: [(1.0, 1)], loop=CLOSED, users=users)
    arrived, finished = run.requests.arrived.to_numpy(), run.requests.finished.to_numpy()
    assert (arrived[:users] == 0).all()
    np.testing.assert_allclose(np.sort(arrived[users:]), np.sort(finished)[:9] + 0.5)
    inside = [(run.requests.arrived <= at).sum() - (run.requests.finished < at).sum() for at in arrived]
    assert max(inside) <= users and run.loop == CLOSED and len(run.requests) == users + 9


@pytest.mark.parametrize(
    ("overload", "outcomes"),
    [
        (Overload(), [DONE, DONE, DONE, DONE]),
        (Overload(waiting=1), [DONE, DONE, DROPPED, DROPPED]),
        (Overload(waiting=2), [DONE, DONE, DONE, DROPPED]),
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
    refused = driven([0, 1, 2], lambda number: [(1.0, 1)], asked=requests(3, too_long=[1]), overload=overload)
    assert refused.requests.outcome.tolist() == [DONE, FAILED, DONE] and refused.requests.reason[1] == "it is too long"


@pytest.mark.parametrize(("late", "warned"), [(0.0, False), (0.004, False), (0.02, True)])
def test_a_generator_that_is_late_says_so(late: float, warned: bool) -> None:
    run = driven(np.arange(1, 40) * 0.5, lambda number: [(0.01, 1)], late=late)
    found = warnings_of(run, figures_of([run], Terms(), Bootstrap(resamples=100)).iloc[0])
    assert run.late == pytest.approx(late, abs=1e-9) and (late > LATE) == warned
    assert any(text.startswith("LATE") for text in found) == warned


class Broken(OneServer):
    """Is interrupted at its fourth turn."""

    turns = 0

    def step(self) -> list[Step]:
        self.turns += 1
        if self.turns == 4:
            raise KeyboardInterrupt
        return super().step()


def test_an_interruption_keeps_what_was_seen_and_lets_the_others_go() -> None:
    clock = Clock()
    server = Broken(clock, lambda number: [(1.0, 1), (1.0, 2)])
    engine = RealEngine(server, clock=clock, sleep=clock.sleep)
    driver = Driver(engine, requests(9), np.arange(9.0), loop=OPEN)
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    run = driver.result(method="m", rate=1.0)
    assert run.requests.outcome.tolist() == [DONE, UNFINISHED, UNFINISHED, UNFINISHED], "those that had arrived"
    assert run.requests.output_tokens.tolist() == [3, 1, 0, 0] and server.aborted == [1, 2, 3] and not server.queue
    assert not run.facts["complete"] and run.facts["planned"] == 9 and run.seconds == 3.0
