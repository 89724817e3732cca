"""Who gets which step: ``generate`` and ``stream`` those of their own requests, ``step`` those of all others."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specdec.types import Step


@dataclass(eq=False)
class Listener:
    """Whoever waits for the steps of some requests.

    Attributes:
        ids: Those that have not ended.
        steps: Steps that have not been taken.
    """

    ids: set[int]
    steps: deque[Step] = field(default_factory=deque)


class Delivery:
    """Sorts steps by who waits for them."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._others: list[Step] = []

    def listen(self, ids: Iterable[int]) -> Listener:
        """Have the steps of some requests kept, until ``leave``."""
        listener = Listener(set(ids))
        self._listeners.append(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        """Stop listening."""
        self._listeners.remove(listener)

    def put(self, steps: Sequence[Step]) -> None:
        """Hand out steps."""
        for step in steps:
            for listener in self._listeners:
                if step.request in listener.ids:
                    listener.steps.append(step)
                    break
            else:
                self._others.append(step)

    def forget(self, ids: set[int]) -> None:
        """Wait no longer for these requests."""
        for listener in self._listeners:
            listener.ids -= ids

    @property
    def waiting(self) -> bool:
        """Whether steps wait that nobody listens for."""
        return bool(self._others)

    def take(self) -> list[Step]:
        """Returns the steps that nobody listens for, once."""
        steps, self._others = self._others, []
        return steps
