"""Who may come in, and which call gets what the engine has done."""

import asyncio
from collections.abc import Sequence

from experiments.serving.calls import Call, Choice
from experiments.serving.fields import RequestError
from experiments.serving.metrics import Metrics
from specdec.types import Step

RETRY_AFTER = 1
"""Seconds after which a client may try again when the queue is full."""


class Front:
    """All open calls, in the event loop's thread.

    Args:
        most: The number of choices that may be open; what comes on top is told to come again.

    Attributes:
        open: The number of places that calls have taken.
        calls: Those that were handed to the engine.
        draining: Whether new calls are refused, because the server is about to stop.
        idle: Set while no place is taken.
    """

    def __init__(self, metrics: Metrics, *, most: int):
        self.metrics, self.most = metrics, most
        self.open = 0
        self.calls: set[Call] = set()
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    def enter(self, count: int, *, had: int = 0) -> int:
        """Take so many places for a call, which may have some already; returns how many it has then.

        Raises:
            RequestError: There are too few, or the server is about to stop.
        """
        if self.draining and not had:
            raise RequestError("the server is about to stop", status=503)
        if self.open + count - had > self.most:
            raise RequestError(f"{self.open} requests are waiting or running already: come again later", status=429)
        self.open += count - had
        self.idle.clear()
        return count

    def leave(self, count: int) -> None:
        """Give so many places back."""
        self.open -= count
        if not self.open:
            self.idle.set()

    def take(self, steps: Sequence[tuple[Choice, Step]]) -> None:
        """Give the rounds of a turn to their calls."""
        self.metrics.turn(steps)
        for choice, step in steps:
            self.metrics.step(choice, step)
            choice.take(step)
            choice.call.take(choice, step)
            choice.call.news.set()

    def refuse_all(self, refusal: RequestError) -> None:
        """End all calls with an error."""
        for call in self.calls:
            call.refuse(refusal)
