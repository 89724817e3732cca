"""Timing that waits for the device, and a budget of seconds that a benchmark keeps to."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from specdec.execution import ReplayExecutor
from specdec.target.runner import ModelRunner


def now(device: torch.device) -> float:
    """Returns the time at which everything is done that was asked of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class Timing:
    """The times of one call, made several times.

    Attributes:
        seconds: Median over the calls that count.
        best: The shortest of them.
        first: The first call of all: what is done once is in it (choosing kernels, capturing).
        once: Seconds that the calls before the counted ones took beyond the median: the cost of what is done once.
        calls: How many calls count.
    """

    seconds: float
    best: float
    first: float
    once: float
    calls: int


def timed(
    call: Callable[[], object], device: torch.device, *, repeats: int, limit: float = 10.0, warm_up: int = 3
) -> Timing:
    """Time a call.

    Args:
        call: What is timed.
        device: What to wait for.
        repeats: Calls that count, at most.
        limit: Seconds for all calls together; at least one counts, however long it takes.
        warm_up: Calls before those that count. Where a single call takes a third of the limit, the first one is all.
    """
    began = time.perf_counter()

    def one() -> float:
        start = now(device)
        call()
        return now(device) - start

    before = [one()]
    while len(before) < warm_up and time.perf_counter() - began < limit / 3:
        before.append(one())
    counted = [one()]
    while len(counted) < repeats and time.perf_counter() - began < limit:
        counted.append(one())
    middle = statistics.median(counted)
    once = max(0.0, sum(before) - middle * len(before))
    return Timing(middle, min(counted), before[0], once, len(counted))


@dataclass
class Budget:
    """Seconds that a benchmark may take, and what it left out to keep to them.

    Attributes:
        total: Seconds.
        left_out: What was not measured, and why.
    """

    total: float
    left_out: list[dict[str, str]] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.total - (time.perf_counter() - self._began)

    def skip(self, what: str, why: str) -> None:
        """Note that something is not measured."""
        self.left_out.append({"what": what, "why": why})

    def share(self, seconds: float) -> "Budget":
        """Returns a part of this budget, whose list of what was left out is the same."""
        return Budget(max(0.0, min(seconds, self.left)), self.left_out)


@contextmanager
def forward_seconds(device: torch.device, *runners: ModelRunner) -> Iterator[list[float]]:
    """Adds up the time inside the forwards of these runners' models, and nothing around them; then, their number.

    A forward that is replayed as a part of something larger is not seen.

    It waits for the device before and after each forward, so the whole takes longer on a GPU than it otherwise would.
    """
    spent = [0.0, 0]

    def timed_forward(run: Callable[..., object]) -> Callable[..., object]:
        def forward(*arguments: object) -> object:
            start = now(device)
            outputs = run(*arguments)
            spent[0] += now(device) - start
            spent[1] += 1
            return outputs

        return forward

    executors = [runner.executor for runner in runners]
    for executor in executors:
        name = "_forward" if isinstance(executor, ReplayExecutor) else "run"
        vars(executor)[name] = timed_forward(getattr(executor, name))
    try:
        yield spent
    finally:
        for executor in executors:
            vars(executor).pop("_forward", None)
            vars(executor).pop("run", None)
