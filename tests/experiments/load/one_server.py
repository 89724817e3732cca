"""An engine that serves one request after the other, in seconds that a test gives it, on a clock that it moves."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.load.arrivals import Times
from experiments.load.driver import Driver, Overload, RealEngine
from experiments.load.run import OPEN, LoadRun
from experiments.load.texts import Asked
from experiments.load.workloads import Planned
from specdec import SamplingParams, Step


class Clock:
    """Seconds that pass when somebody sleeps, each time ``late`` longer than asked, or is served."""

    def __init__(self, late: float = 0.0):
        self.now, self.late = 100.0, late

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-9) + self.late  # a sleep too short to count would never end


class OneServer:
    """Serves in the order of arrival: a turn is a round of the first request, as many (seconds, tokens) as it has."""

    max_batch_size = 1

    def __init__(self, clock: Clock, rounds: Callable[[int], Sequence[tuple[float, int]]]):
        self._clock, self._rounds = clock, rounds
        self.queue: list[int] = []
        self.left: dict[int, list[tuple[float, int]]] = {}
        self.entered: dict[int, float] = {}
        self.aborted: list[int] = []

    @property
    def unfinished(self) -> int:
        return len(self.queue)

    def submit(
        self, prompt: Any, sampling: SamplingParams, *, speculate: bool = True, arrived: float | None = None
    ) -> int:
        assert sampling.stream is not None and arrived is not None and arrived <= self._clock.now
        self.queue.append(sampling.stream)
        self.left[sampling.stream] = list(self._rounds(sampling.stream))
        return sampling.stream

    def step(self) -> list[Step]:
        request = self.queue[0]
        entered = self.entered.setdefault(request, self._clock.now)
        seconds, tokens = self.left[request].pop(0)
        self._clock.now += seconds
        ended = not self.left[request]
        if ended:
            self.queue.pop(0)
        return [
            Step(
                request=request,
                round=0,
                token_ids=(1,) * tokens,
                proposed_nodes=4,
                proposed_depth=4,
                accepted=tokens - 1,
                elapsed=self._clock.now - entered,
                visible=self._clock.now,
                finish_reason="length" if ended else None,
            )
        ]

    def abort(self, request_id: int) -> None:
        self.queue.remove(request_id)
        self.aborted.append(request_id)


def requests(
    count: int, klass: Callable[[int], str] = lambda number: "any", *, too_long: Sequence[int] = ()
) -> list[Asked]:
    return [
        Asked(
            planned=Planned(klass=klass(number), pieces=((number, 10),), output_tokens=4, fits=number not in too_long),
            prompt_ids=(1,) * 10,
            sampling=SamplingParams(stream=number),
        )
        for number in range(count)
    ]


def driven(
    times: Times | Sequence[float],
    rounds: Callable[[int], Sequence[tuple[float, int]]],
    *,
    asked: Sequence[Asked] | None = None,
    loop: str = OPEN,
    users: int = 0,
    overload: Overload | None = None,
    late: float = 0.0,
    method: str = "m",
    rate: float = 1.0,
) -> LoadRun:
    """What a driver has seen of one server."""
    clock = Clock(late)
    driver = Driver(
        RealEngine(OneServer(clock, rounds), clock=clock, sleep=clock.sleep),
        requests(len(times)) if asked is None else asked,
        np.asarray(times, dtype=np.float64),
        loop=loop,
        users=users,
        overload=overload or Overload(),
    )
    driver.run()
    return driver.result(method=method, rate=rate, slots=1)
