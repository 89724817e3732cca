"""Where a round's time goes, by stage. Costs nothing when off; on a GPU it uses events, which do not synchronize."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

COMPLETION = "completion"
"""What the host makes of a round's tokens: text, stop strings, steps. On a GPU the next round may run meanwhile."""
STAGES = ("prefill", "draft", "verify", "accept", "commit", COMPLETION)


class StageTimer:
    """Adds up the time of stages until ``take`` is called, if it is ``enabled``."""

    def __init__(self, device: torch.device, *, enabled: bool):
        self.enabled = enabled
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Measure the body of a ``with`` statement as part of stage ``name``."""
        return self._measure(name) if self.enabled else nullcontext()

    @contextmanager
    def _measure(self, name: str) -> Iterator[None]:
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            start = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Returns the seconds of every stage since the last call; on a GPU, of those that have ended there."""
        waiting = []
        for name, begin, end in self._events:
            if end.query():
                self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000
            else:
                waiting.append((name, begin, end))
        seconds, self._seconds, self._events = self._seconds, {}, waiting
        return seconds
