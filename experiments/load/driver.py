"""Plays requests against an engine by the clock, and notes what happens to them."""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from experiments.load.arrivals import Times
from experiments.load.run import (
    CLOSED,
    DONE,
    DROPPED,
    FAILED,
    REQUESTS,
    TURNS,
    UNFINISHED,
    LoadRun,
    Totals,
    typed,
)
from experiments.load.texts import Asked
from specdec.engine.engine import Engine
from specdec.engine.scheduler import View, Work
from specdec.requests import SamplingParams
from specdec.types import Step

LONGEST_SLEEP = 0.05
"""Seconds that nothing is looked at for."""


class Serving(Protocol):
    """What the driver asks of an engine."""

    @property
    def unfinished(self) -> int:
        """The number of requests that wait or run."""
        ...

    def submit(
        self, prompt: Any, sampling: SamplingParams, *, speculate: bool = True, arrived: float | None = None
    ) -> int:
        """Take a request, and return its id."""
        ...

    def step(self) -> list[Step]:
        """Run a turn, and return what has happened in it."""
        ...

    def abort(self, request_id: int) -> None:
        """Drop a request."""
        ...


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
        return [] if patience is None else [each for each, at in self.silent.items() if now - at > patience]

    def ended(self, number: int, at: float) -> None:
        """Take note of an end, after which a user of a closed loop thinks and comes again."""
        self.silent.pop(number, None)
        if (following := next(self._later, None)) is not None:
            heapq.heappush(self.due, (at + float(self._times[following]), following))


@dataclass
class _Seen:
    """The course of one request, by the names of the columns; seconds are on the driver's clock."""

    arrived: float
    submitted: float = np.nan
    admitted: float = np.nan
    prefilled: float = np.nan
    finished: float = np.nan
    outcome: str = UNFINISHED
    reason: str = ""
    emissions: list[tuple[float, int]] = field(default_factory=list)
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
        times: See ``Entrance``, like loop and users.
    """

    def __init__(
        self,
        engine: Serving,
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
        self._seen: dict[int, _Seen] = {}
        self._live: dict[int, int] = {}  # the number of a request by the engine's id
        self._turns: list[dict[str, Any]] = []
        self._own_delays: list[float] = []
        self._notes: list[tuple[View, Work]] = []  # one where the scheduler was asked in this turn
        self._begun = self._last_end = 0.0

    def run(self) -> None:
        """Play everything. What was seen until an exception is kept."""
        self._before = self._counts()
        self._begun, self._last_end = self._clock(), 0.0
        if isinstance(self._engine, Engine):
            self._engine.on_turn = lambda view, work: self._notes.append((view, work))
        try:
            while self._entrance.due or self._live:
                self._submit_due()
                self._lose_patience()
                if self._engine.unfinished:
                    self._turn()
                elif self._entrance.due:
                    self._sleep(self._until_due())
        finally:
            if isinstance(self._engine, Engine):
                self._engine.on_turn = None
            for identity in self._live:
                self._engine.abort(identity)
            self._ended = self._now()

    def _now(self) -> float:
        return self._clock() - self._begun

    def _until_due(self) -> float:
        due = self._entrance.due[0][0] - self._now() if self._entrance.due else LONGEST_SLEEP
        return max(0.0, min(due, LONGEST_SLEEP))

    def _submit_due(self) -> None:
        for number, arrived, outcome, reason in self._entrance.arrivals(self._now):
            seen, asked = _Seen(arrived), self._asked[number]
            self._seen[number] = seen
            if outcome:
                self._end(number, outcome, self._now(), reason)
                continue
            identity = self._engine.submit(
                asked.prompt_ids, asked.sampling, speculate=self._speculate, arrived=self._begun + arrived
            )
            seen.submitted = self._now()
            self._own_delays.append(seen.submitted - max(arrived, self._last_end))
            self._live[identity] = number

    def _lose_patience(self) -> None:
        now = self._now()
        gone = set(self._entrance.impatient(now))
        for identity in [identity for identity, number in self._live.items() if number in gone]:
            self._engine.abort(identity)
            self._end(self._live.pop(identity), DROPPED, now, "it had waited too long")

    def _turn(self) -> None:
        inside, begin = self._engine.unfinished, self._now()
        self._notes.clear()
        steps = self._engine.step()
        self._last_end = self._now()
        for step in steps:
            self._take(step)
        # Where nothing else is known, those that no slot is left for wait.
        waiting, turn = max(0, inside - getattr(self._engine, "max_batch_size", inside)), dict.fromkeys(TURNS, 0)
        free_pages = self._turns[-1]["free_pages"] if self._turns else -1
        for view, work in self._notes:
            entered = sum(request.slot >= 0 for request in view.waiting)
            waiting = len(view.waiting) - entered + len(work.preempt)
            free_pages = -1 if view.free_pages is None else view.free_pages
            turn |= {"prefill_tokens": _prefilled(view, work), "preempted": len(work.preempt)}
        turn |= {
            "begin": begin,
            "seconds": self._last_end - begin,
            "rows": len(steps),
            "nodes": sum(step.proposed_nodes for step in steps),
            "depth": max((step.proposed_depth for step in steps), default=0),
            "committed": sum(len(step.token_ids) for step in steps),
            "running": inside - waiting,
            "waiting": waiting,
            "free_pages": free_pages,
        }
        self._turns.append(turn)

    def _take(self, step: Step) -> None:
        number = self._live.get(step.request)
        if number is None:
            return
        seen, visible = self._seen[number], step.visible - self._begun
        seen.rounds += 1
        seen.drafted += step.proposed_depth
        seen.nodes += step.proposed_nodes
        seen.accepted += step.accepted
        if step.token_ids:
            self._entrance.silent.pop(number, None)
            seen.emissions.append((visible, len(step.token_ids)))
            seen.tokens += step.token_ids
        if np.isnan(seen.admitted):
            seen.admitted = visible - step.elapsed
        if step.timestamps is not None:
            seen.prefilled = step.timestamps.prefilled - self._begun
            seen.reused_tokens, seen.recomputed_tokens = step.timestamps.reused, step.timestamps.recomputed
            seen.preemptions, seen.preempted_seconds = step.timestamps.preemptions, step.timestamps.preempted
        if step.finish_reason is not None:
            del self._live[step.request]
            self._end(number, FAILED if step.finish_reason == "error" else DONE, visible, step.error or "")

    def _end(self, number: int, outcome: str, at: float, reason: str = "") -> None:
        seen = self._seen[number]
        seen.outcome, seen.finished, seen.reason = outcome, at, "" if outcome == DONE else reason
        self._entrance.ended(number, at)

    def _counts(self) -> Totals:
        counts = getattr(self._engine, "page_counts", None)
        if counts is None:
            return Totals()
        return Totals(**{name: getattr(counts, name, 0) for name in vars(Totals())})

    def result(self, *, method: str, rate: float, **facts: Any) -> LoadRun:
        """Return what was seen; requests that had not arrived yet when the run was broken off are left out."""
        rows = []
        for number, seen in sorted(self._seen.items()):
            planned, emissions = self._asked[number].planned, seen.emissions
            rows.append(
                {
                    **vars(seen),
                    "request": number,
                    **{name: getattr(planned, name) for name in ("klass", "user", "priority", "prompt_tokens")},
                    "first_token": emissions[0][0] if emissions else np.nan,
                    "output_tokens": sum(count for _, count in emissions),
                }
            )
        after = vars(self._counts())
        totals = {name: after[name] - before for name, before in vars(self._before).items()}
        ends = [seen.finished for seen in self._seen.values() if seen.outcome == DONE]
        whole = len(self._seen) == len(self._asked) and not self._live
        delays = self._own_delays
        requests = typed(rows, REQUESTS)
        requests["emissions"] = [self._seen[number].emissions for number in requests.request]
        requests["tokens"] = [self._seen[number].tokens for number in requests.request]
        return LoadRun(
            method=method,
            rate=rate,
            loop=self._entrance.loop,
            seconds=max(ends, default=self._ended) if whole else self._ended,
            requests=requests,
            turns=typed(self._turns, TURNS),
            totals=replace(self._before, **totals),
            late=float(np.quantile(delays, 0.99, method="inverted_cdf")) if delays else 0.0,
            facts={"complete": whole, "planned": len(self._asked), **facts},
        )


def _prefilled(view: View, work: Work) -> int:
    """Return how many tokens a turn has prefilled; of a new request, those that the cache had are planned in vain."""
    new = {request.id for request in view.waiting if not request.preemptions}
    return sum(
        min(count, max(request.prefilled - request.reused, 0)) if request.id in new else count
        for request, count in work.prefill
    )
