"""Plays requests against an engine by the clock, and notes what happens to them."""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from experiments.load.arrivals import Times
from experiments.load.run import CLOSED, DONE, DROPPED, FAILED, REQUESTS, TURNS, UNFINISHED, LoadRun, typed
from experiments.load.texts import Asked
from specdec.cache.pages import PageCounts
from specdec.engine.engine import Engine
from specdec.engine.scheduler import View, Work
from specdec.types import Step

LONGEST_SLEEP = 0.05
"""Seconds that nothing is looked at for."""


@dataclass(frozen=True, kw_only=True)
class Overload:
    """What is done where more arrives than can be served.

    Attributes:
        waiting: A request is dropped at once if so many others wait for their first token; None: never.
        patience: Seconds after which a request without a first token is dropped; None: never.
        spare: The share of its time and slots that the engine should have left; the report says whether it has. None:
            nothing is asked.
    """

    waiting: int | None = None
    patience: float | None = None
    spare: float | None = None

    def __post_init__(self) -> None:
        if self.waiting is not None and self.waiting < 1:
            raise ValueError(f"overload.waiting={self.waiting}: give at least 1 request, or null for no limit")
        if self.patience is not None and not self.patience > 0:
            raise ValueError(f"overload.patience={self.patience}: give seconds above 0, or null for no limit")
        if self.spare is not None and not 0 < self.spare < 1:
            raise ValueError(f"overload.spare={self.spare}: give a share between 0 and 1, or null")


class Entrance:
    """Says who arrives when, who is turned away and who loses patience: in real and in virtual time alike.

    Args:
        times: When requests arrive, in seconds; in a closed loop, how long their user thinks before them.
        loop: ``OPEN`` or ``CLOSED``.
        users: In a closed loop, how many requests are there at a time.

    Attributes:
        due: A heap of moments and the numbers of requests that come then. In a closed loop it has the first request of
            every user, and others are put there by answers.
        silent: Requests without a token, and when they arrived.
    """

    def __init__(self, asked: Sequence[Asked], times: Times, loop: str, users: int, overload: Overload):
        self.loop, self._asked, self._times, self._overload = loop, asked, times, overload
        first = len(asked) if loop != CLOSED else min(users, len(asked))
        self.due = [(float(times[number]), number) for number in range(first)]
        heapq.heapify(self.due)
        self._later = iter(range(first, len(asked)))
        self.silent: dict[int, float] = {}

    def arrivals(self, now: Callable[[], float]) -> Iterator[tuple[int, float, str, str]]:
        """Yield the number and moment of everyone who has come, and of who is turned away the outcome and why."""
        limit = self._overload.waiting
        while self.due and self.due[0][0] <= now():
            arrived, number = heapq.heappop(self.due)
            if not self._asked[number].planned.fits:
                yield number, arrived, FAILED, "it is too long"
            elif limit is not None and len(self.silent) >= limit:
                yield number, arrived, DROPPED, "too many waited"
            else:
                self.silent[number] = arrived
                yield number, arrived, "", ""

    def impatient(self, now: float) -> list[int]:
        """Return who has waited too long for a first token."""
        patience = self._overload.patience
        return [] if patience is None else [number for number, at in self.silent.items() if now - at > patience]

    def ended(self, number: int, at: float) -> None:
        """Take note of an end, after which a user of a closed loop thinks and comes again."""
        self.silent.pop(number, None)
        if (following := next(self._later, None)) is not None:
            heapq.heappush(self.due, (at + float(self._times[following]), following))


@dataclass
class _Course:
    """The course of one request, by the names of the columns; seconds are on the driver's clock."""

    arrived: float
    submitted: float = np.nan
    admitted: float = np.nan
    prefilled: float = np.nan
    first_token: float = np.nan
    finished: float = np.nan
    outcome: str = UNFINISHED
    reason: str = ""
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    nodes: int = 0
    accepted: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    preempted_seconds: float = 0.0


class Driver:
    """Submits requests at their times between the turns of an engine.

    An engine is asked for a turn at a time and cannot be interrupted, so what arrives during a turn waits for its end,
    as it would in any engine that schedules by iterations. That wait is the engine's. What the driver itself is late
    by is kept apart (``LoadRun.late``).

    Args:
        engine: An ``Engine``, or what takes requests by ``submit``, ``step`` and ``abort`` as it does.
        times: See ``Entrance``, like loop and users.
    """

    def __init__(
        self,
        engine: Any,
        asked: Sequence[Asked],
        times: Times,
        *,
        loop: str,
        users: int = 0,
        overload: Overload = Overload(),
        speculate: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ):
        self._engine, self._asked, self._speculate = engine, asked, speculate
        self._clock, self._sleep = clock, sleep
        self._entrance = Entrance(asked, times, loop, users, overload)
        self._courses: dict[int, _Course] = {}
        self._live: dict[int, int] = {}  # the number of a request by the engine's id
        self._turns: list[dict[str, Any]] = []
        self._delays: list[float] = []
        self._planned: list[tuple[View, Work]] = []  # what the scheduler has seen and planned in this turn
        self._begun = self._last_end = 0.0

    def run(self) -> None:
        """Play everything. What was seen until an exception is kept."""
        self._before = self._counts()
        self._begun, self._last_end = self._clock(), 0.0
        if isinstance(self._engine, Engine):
            self._engine.on_turn = lambda view, work: self._planned.append((view, work))
        try:
            while self._entrance.due or self._live:
                self._submit_due()
                self._lose_patience()
                if self._engine.unfinished:
                    self._turn()
                elif self._entrance.due:
                    self._sleep(max(0.0, min(self._entrance.due[0][0] - self._now(), LONGEST_SLEEP)))
        finally:
            if isinstance(self._engine, Engine):
                self._engine.on_turn = None
            for identity in self._live:
                self._engine.abort(identity)
            self._ended = self._now()

    def _now(self) -> float:
        return self._clock() - self._begun

    def _submit_due(self) -> None:
        for number, arrived, outcome, reason in self._entrance.arrivals(self._now):
            course, asked = _Course(arrived), self._asked[number]
            self._courses[number] = course
            if outcome:
                self._end(number, outcome, self._now(), reason)
                continue
            identity = self._engine.submit(
                asked.prompt_ids, asked.sampling, speculate=self._speculate, arrived=self._begun + arrived
            )
            course.submitted = self._now()
            self._delays.append(course.submitted - max(arrived, self._last_end))
            self._live[identity] = number

    def _lose_patience(self) -> None:
        now = self._now()
        gone = set(self._entrance.impatient(now))
        for identity in [identity for identity, number in self._live.items() if number in gone]:
            self._engine.abort(identity)
            self._end(self._live.pop(identity), DROPPED, now, "it had waited too long")

    def _turn(self) -> None:
        inside, begin = self._engine.unfinished, self._now()
        self._planned.clear()
        steps = self._engine.step()
        self._last_end = self._now()
        for step in steps:
            self._take(step)
        # Where nothing else is known, those that no slot is left for wait.
        waiting = max(0, inside - getattr(self._engine, "max_batch_size", inside))
        free_pages, prefilled, preempted = self._turns[-1]["free_pages"] if self._turns else -1, 0, 0
        for view, work in self._planned:
            preempted, prefilled = len(work.preempt), _prefilled(view, work)
            waiting = sum(request.slot < 0 for request in view.waiting) + preempted
            free_pages = -1 if view.free_pages is None else view.free_pages
        self._turns.append(
            {
                "begin": begin,
                "seconds": self._last_end - begin,
                "prefill_tokens": prefilled,
                "rows": len(steps),
                "nodes": sum(step.proposed_nodes for step in steps),
                "depth": max((step.proposed_depth for step in steps), default=0),
                "committed": sum(len(step.token_ids) for step in steps),
                "running": inside - waiting,
                "waiting": waiting,
                "free_pages": free_pages,
                "preempted": preempted,
            }
        )

    def _take(self, step: Step) -> None:
        number = self._live.get(step.request)
        if number is None:
            return
        course, visible = self._courses[number], step.visible - self._begun
        course.rounds += 1
        course.drafted += step.proposed_depth
        course.nodes += step.proposed_nodes
        course.accepted += step.accepted
        if step.token_ids:
            self._entrance.silent.pop(number, None)
            course.first_token = course.first_token if course.tokens else visible
            course.tokens += step.token_ids
        if np.isnan(course.admitted):
            course.admitted = visible - step.elapsed
        if step.timestamps is not None:
            course.prefilled = step.timestamps.prefilled - self._begun
            course.reused_tokens, course.recomputed_tokens = step.timestamps.reused, step.timestamps.recomputed
            course.preemptions, course.preempted_seconds = step.timestamps.preemptions, step.timestamps.preempted
        if step.finish_reason is not None:
            del self._live[step.request]
            self._end(number, FAILED if step.finish_reason == "error" else DONE, visible, step.error or "")

    def _end(self, number: int, outcome: str, at: float, reason: str) -> None:
        course = self._courses[number]
        course.outcome, course.finished, course.reason = outcome, at, "" if outcome == DONE else reason
        self._entrance.ended(number, at)

    def _counts(self) -> dict[str, Any]:
        return asdict(getattr(self._engine, "page_counts", PageCounts()))

    def result(self, *, method: str, rate: float, **facts: Any) -> LoadRun:
        """Return what was seen; requests that had not arrived yet when the run was broken off are left out."""
        rows = []
        for number, course in sorted(self._courses.items()):
            planned = self._asked[number].planned
            about = {name: getattr(planned, name) for name in ("klass", "user", "priority", "prompt_tokens")}
            rows.append({**vars(course), "request": number, **about, "output_tokens": len(course.tokens)})
        after = self._counts()
        ends = [course.finished for course in self._courses.values() if course.outcome == DONE]
        whole = len(self._courses) == len(self._asked) and not self._live
        return LoadRun(
            method=method,
            rate=rate,
            loop=self._entrance.loop,
            seconds=max(ends, default=self._ended) if whole else self._ended,
            requests=typed(rows, REQUESTS).assign(tokens=[row["tokens"] for row in rows]),
            turns=typed(self._turns, TURNS),
            totals=PageCounts(**{name: after[name] - self._before[name] for name in after}),
            late=float(np.quantile(self._delays, 0.99, method="inverted_cdf")) if self._delays else 0.0,
            facts={"complete": whole, "planned": len(self._asked), **facts},
        )


def _prefilled(view: View, work: Work) -> int:
    """Return how many tokens a turn has prefilled; of a new request, those that the cache had are planned in vain."""
    new = {request.id for request in view.waiting if not request.preemptions}
    return sum(
        min(count, max(request.prefilled - request.reused, 0)) if request.id in new else count
        for request, count in work.prefill
    )
