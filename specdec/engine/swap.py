"""The host's memory for the keys and values of preempted requests."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from specdec.cache.base import Cache
from specdec.cache.states import States


class Swapped(NamedTuple):
    """What a preempted request had in the caches.

    Attributes:
        length: The number of its first positions.
        tensors: Their entries, cache by cache.
        states: The states behind them, of the caches that have any.
    """

    length: int
    tensors: list[list[Tensor]]
    states: list[list[Tensor]]


class Swap:
    """Keys and values of preempted requests, by the requests' ids: at most ``limit`` bytes."""

    def __init__(self, limit: int):
        self.limit = self._left = limit
        self._kept: dict[int, Swapped] = {}

    def has_room(self, length: int, caches: Sequence[Cache], states: Sequence[States]) -> bool:
        """Return whether so many positions of these caches fit, and the states behind them."""
        positions = length * sum(cache.bytes_per_position for cache in caches)
        return positions + sum(each.bytes_per_state for each in states) <= self._left

    def put(self, request_id: int, length: int, tensors: list[list[Tensor]], states: list[list[Tensor]]) -> None:
        """Keep the first positions of a request."""
        self._kept[request_id] = Swapped(length, tensors, states)
        self._left -= _size([*tensors, *states])

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._left = self.limit

    def take(self, request_id: int) -> Swapped | None:
        """Return what was kept of a request, and forget it; None if there is nothing."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self._left += _size([*kept.tensors, *kept.states])
        return kept


def _size(tensors: list[list[Tensor]]) -> int:
    return sum(each.nbytes for cache in tensors for each in cache)
