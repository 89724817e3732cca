"""Which waiting request runs next, in which slot."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from specdec.requests import Request


class Scheduler(ABC):
    """Decides which waiting requests get free slots.

    The engine adds requests, and asks at the beginning of every step which of them to admit.
    """

    @abstractmethod
    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests."""

    @abstractmethod
    def remove(self, ids: set[int]) -> None:
        """Forget the requests of these ids that still wait; other ids are ignored."""

    @abstractmethod
    def admit(self, free_slots: list[int]) -> Iterator[tuple[int, Request]]:
        """Yields pairs of a slot and the request that gets it, which then no longer waits.

        Args:
            free_slots: The free slots, in ascending order.
        """

    @abstractmethod
    def waiting(self) -> list[int]:
        """Returns the ids of the requests that wait."""

    def __len__(self) -> int:
        return len(self.waiting())


class FirstComeFirstServed(Scheduler):
    """Admits requests in the order in which they came, each to the first free slot."""

    def __init__(self) -> None:
        # A dict keeps the order and forgets a request without a search.
        self._waiting: dict[int, Request] = {}

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests behind those that wait."""
        self._waiting.update((request.id, request) for request in requests)

    def remove(self, ids: set[int]) -> None:
        """Forget requests."""
        for waiting in ids:
            self._waiting.pop(waiting, None)

    def admit(self, free_slots: list[int]) -> Iterator[tuple[int, Request]]:
        """Yields the longest waiting requests, one per free slot."""
        for slot in free_slots:
            if not self._waiting:
                return
            yield slot, self._waiting.pop(next(iter(self._waiting)))

    def waiting(self) -> list[int]:
        """Returns the ids of the requests that wait, the longest waiting first."""
        return list(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)
