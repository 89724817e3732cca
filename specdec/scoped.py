"""A context variable that has a value during a ``with`` block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_Value = TypeVar("_Value")


@contextmanager
def scoped(variable: ContextVar[_Value], value: _Value) -> Iterator[_Value]:
    """Set a variable for this thread during the ``with`` block, which gets the value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
