"""Plays requests against an engine by its clock, real or virtual, and notes what happens to them."""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from experiments.load.arrivals import Times
from experiments.load.run import CLOSED, DONE, DROPPED, FAILED, REQUESTS, TURNS, UNFINISHED, LoadRun, typed
from experiments.load.workloads import Asked
from specdec.arguments import whole
from specdec.cache.pages import PageCounts
from specdec.engine.scheduler import View, Work

LONGEST_SLEEP = 0.05
"""Seconds that nothing is looked at for."""
Rows = Int[np.ndarray, " batch"]
"""Numbers of requests, or a count for each of them."""


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
        if self.waiting is not None:
            whole("overload.waiting", self.waiting, least=1)
        for name, most, wanted in (("patience", np.inf, "seconds above 0"), ("spare", 1, "a share between 0 and 1")):
            value = getattr(self, name)
            if value is not None and not 0 < value < most:
                raise ValueError(f"overload.{name}={value}: give {wanted}, or null")


class Driver:
    """Submits requests at their times between the turns of an engine.

    An engine is asked for a turn at a time and cannot be interrupted, so what arrives during a turn waits for its end,
    as it would in any engine that schedules by iterations. That wait is the engine's. What the driver itself is late
    by is kept apart (``LoadRun.late``).

    Args:
        engine: A ``RealEngine``, or another that has its methods: requests have numbers, and seconds count from the
            beginning of the run. A ``turn`` calls ``round`` and ``end``, and returns its values of ``TURNS``.
        times: When requests arrive, in seconds; in a closed loop, how long their user thinks before them.
        loop: ``OPEN`` or ``CLOSED``.
        users: In a closed loop, how many requests are there at a time.

    Attributes:
        columns: What has become of every request, by the columns of ``REQUESTS``.
        tokens: The outputs, of engines that make any.
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
    ):
        self.asked, self.tokens = asked, [[] for _ in asked]
        self._engine, self._times, self._loop, self._overload = engine, times, loop, overload
        first = len(asked) if loop != CLOSED else min(users, len(asked))
        # A heap of moments and the requests that come then; in a closed loop, answers put further ones there.
        self._due = [(float(times[number]), number) for number in range(first)]
        heapq.heapify(self._due)
        self._later = iter(range(first, len(asked)))
        self._silent: dict[int, float] = {}  # requests without a token, and when they arrived
        table = typed({"request": np.arange(len(asked))}, REQUESTS)
        self.columns = {name: table[name].to_numpy(copy=True) for name in REQUESTS}
        for name in ("klass", "priority", "prompt_tokens"):
            self.columns[name][:] = [getattr(one.planned, name) for one in asked]
        self.columns["outcome"][:] = UNFINISHED
        self._turns: list[tuple[Any, ...]] = []
        self._delays: list[float] = []
        self._last_end = self._ended = 0.0

    def run(self) -> None:
        """Play everything. What was seen until an exception is kept."""
        engine, due = self._engine, self._due
        engine.begin(self)
        try:
            while due or engine.unfinished:
                self._arrive()
                if engine.unfinished:
                    self._turns.append(engine.turn())
                    self._last_end = engine.now()
                elif due:
                    engine.wait(due[0][0])
        finally:
            self._ended = engine.now()
            engine.close()

    def _arrive(self) -> None:
        """Submit who has come, turn away who finds too many waiting, and drop who has waited too long."""
        engine, due, waiting, patience = self._engine, self._due, self._overload.waiting, self._overload.patience
        while due and due[0][0] <= engine.now():
            arrived, number = heapq.heappop(due)
            self.columns["arrived"][number] = arrived
            if waiting is not None and len(self._silent) >= waiting:
                self.end(number, DROPPED, engine.now(), "too many waited")
            else:
                engine.submit(number, arrived)
                self._silent[number] = arrived
                self._delays.append(engine.now() - max(arrived, self._last_end))
        now = engine.now()
        for number in [] if patience is None else [n for n, at in self._silent.items() if now - at > patience]:
            engine.abort(number)
            self.end(number, DROPPED, now, "it had waited too long")

    def round(self, rows: Rows, visible: Any, tokens: Rows, **counts: Any) -> None:
        """Note a round: when its tokens were visible, how many each row has got, and what is added to other columns."""
        if self._silent:
            first = (self.columns["output_tokens"][rows] == 0) & (tokens > 0)
            self.columns["first_token"][rows[first]] = np.broadcast_to(visible, rows.shape)[first]
            for number in rows[first].tolist():
                self._silent.pop(number, None)
        for name, values in {"rounds": 1, "output_tokens": tokens, **counts}.items():
            self.columns[name][rows] += values

    def end(self, number: int, outcome: str, at: float, reason: str = "") -> None:
        """Note the end of a request, after which a user of a closed loop thinks and comes again."""
        for name, value in (("outcome", outcome), ("finished", at), ("reason", reason)):
            self.columns[name][number] = value
        self._silent.pop(number, None)
        if (following := next(self._later, None)) is not None:
            heapq.heappush(self._due, (at + float(self._times[following]), following))

    def result(self, *, method: str, rate: float, **facts: Any) -> LoadRun:
        """Return the records of requests; those that had not arrived when the run was broken off are left out."""
        came = np.flatnonzero(~np.isnan(self.columns["arrived"]))
        requests = typed({name: values[came] for name, values in self.columns.items()}, REQUESTS)
        complete = len(came) == len(self.asked) and bool((requests.outcome != UNFINISHED).all())
        ends = requests.finished[requests.outcome == DONE]
        tokens = {"tokens": [self.tokens[number] for number in came]} if any(self.tokens) else {}
        return LoadRun(
            method=method,
            rate=rate,
            loop=self._loop,
            seconds=float(ends.max()) if complete and len(ends) else self._ended,
            requests=requests.assign(**tokens),
            turns=typed(dict(zip(TURNS, zip(*self._turns, strict=True), strict=True)) if self._turns else [], TURNS),
            totals=self._engine.totals,
            late=float(np.quantile(self._delays, 0.99, method="inverted_cdf")) if self._delays else 0.0,
            facts={"complete": complete, "planned": len(self.asked), **facts},
        )


class RealEngine:
    """An ``Engine`` by the real clock."""

    def __init__(
        self,
        engine: Any,
        *,
        speculate: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ):
        self._engine, self._speculate, self._clock, self._sleep = engine, speculate, clock, sleep
        self._live: dict[int, int] = {}  # the number of a request by the engine's id
        self._planned: list[tuple[View, Work]] = []  # by the scheduler in this turn, if it was asked

    def begin(self, driver: Driver) -> None:
        self._driver, self._before, self._begun = driver, asdict(self._engine.page_counts), self._clock()
        self._engine.on_turn = lambda view, work: self._planned.append((view, work))

    def close(self) -> None:
        self._engine.on_turn = None
        for identity in self._live:
            self._engine.abort(identity)

    @property
    def unfinished(self) -> int:
        return len(self._live)

    @property
    def totals(self) -> PageCounts:
        counts = asdict(self._engine.page_counts)
        return PageCounts(**{name: value - self._before[name] for name, value in counts.items()})

    def now(self) -> float:
        return self._clock() - self._begun

    def wait(self, until: float) -> None:
        self._sleep(max(0.0, min(until - self.now(), LONGEST_SLEEP)))

    def submit(self, number: int, arrived: float) -> None:
        asked, arrived = self._driver.asked[number], self._begun + arrived
        identity = self._engine.submit(asked.prompt_ids, asked.sampling, speculate=self._speculate, arrived=arrived)
        self._live[identity] = number

    def abort(self, number: int) -> None:
        identity = next(identity for identity, live in self._live.items() if live == number)
        del self._live[identity]
        self._engine.abort(identity)

    def turn(self) -> tuple[Any, ...]:
        inside, begin = self._engine.unfinished, self.now()
        self._planned.clear()
        steps = self._engine.step()
        seconds = self.now() - begin
        self._note([(self._live[step.request], step) for step in steps if step.request in self._live])
        # Where the scheduler was not asked, those that no slot is left for wait.
        waiting, prefilled = max(0, inside - self._engine.max_batch_size), 0
        for view, work in self._planned:
            waiting = sum(request.slot < 0 for request in view.waiting) + len(work.preempt)
            prefilled = sum(count for _, count in work.prefill)
        return begin, seconds, prefilled, len(steps), inside - waiting, waiting

    def _note(self, steps: Sequence[tuple[int, Any]]) -> None:
        columns, begun = self._driver.columns, self._begun
        for number, step in steps:
            self._driver.tokens[number] += step.token_ids
            if np.isnan(columns["admitted"][number]):
                columns["admitted"][number] = step.visible - step.elapsed - begun
            if (stamps := step.timestamps) is not None:
                columns["reused_tokens"][number] = stamps.reused
                columns["recomputed_tokens"][number] = stamps.recomputed
                columns["preemptions"][number] = stamps.preemptions
        if steps:
            names = {"drafted": "proposed_depth", "nodes": "proposed_nodes", "accepted": "accepted"}
            counts = {column: [getattr(step, name) for _, step in steps] for column, name in names.items()}
            tokens = np.array([len(step.token_ids) for _, step in steps])
            visible = np.array([step.visible - begun for _, step in steps])
            self._driver.round(np.array([number for number, _ in steps]), visible, tokens, **counts)
        for number, step in steps:
            if step.finish_reason is not None:
                del self._live[step.request]
                outcome = FAILED if step.finish_reason == "error" else DONE
                self._driver.end(number, outcome, step.visible - begun, step.error or "")
