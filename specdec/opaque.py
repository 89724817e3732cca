"""A call that counts as one operation while the operations of a piece of work are noted (``execution.program``)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol


class Notes(Protocol):
    """What notes operations."""

    def call(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], like: Callable[[], Any] | None = None
    ) -> Any:
        """Return the result of a function, and note the call as one operation."""

    def add(self, function: Callable[..., Any], arguments: tuple[Any, ...], outputs: Any) -> None:
        """Note an operation that has been done."""

    def apart(self) -> AbstractContextManager[None]:
        """During the ``with`` block, nothing is noted."""
        ...

    def refuse(self, reason: str) -> None:
        """Note that the work cannot be repeated. It goes on: half of it may have changed something already."""


# One per thread: others may run other models meanwhile.
noting: ContextVar[Notes | None] = ContextVar("noting", default=None)


def opaque(function: Callable[..., Any], *arguments: Any, like: Callable[[], Any] | None = None) -> Any:
    """Return the result of a function. While operations are noted, the call is one, whatever happens inside.

    ``like`` returns an empty tensor like the result, for tensors without numbers.
    """
    notes = noting.get()
    return function(*arguments) if notes is None else notes.call(function, arguments, like)
