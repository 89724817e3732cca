"""A call that counts as one operation while the operations of a piece of work are noted (``execution.program``)."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

# What notes operations (``execution.program``), one per thread: others may run other models meanwhile.
noting: ContextVar[Any] = ContextVar("noting", default=None)


def opaque(function: Callable[..., Any], *arguments: Any, like: Callable[[], Any] | None = None) -> Any:
    """Return the result of a function. While operations are noted, the call is one, whatever happens inside.

    ``like`` returns an empty tensor like the result, for tensors without numbers.
    """
    notes = noting.get()
    return function(*arguments) if notes is None else notes.call(function, arguments, like)
