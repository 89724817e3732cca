"""Context variables with a value during a ``with`` block; one says what the host may look at without waiting."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor

_Value = TypeVar("_Value")


@contextmanager
def scoped(variable: ContextVar[_Value], value: _Value) -> Iterator[_Value]:
    """Set a variable for this thread during the ``with`` block, which gets the value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


_looks_are_free: ContextVar[bool] = ContextVar("looks_are_free", default=True)


def can_look(tensor: Tensor) -> bool:
    """Returns whether reading a value of this tensor is free. On a GPU it would make the host wait."""
    return _looks_are_free.get() and tensor.device.type == "cpu"


def without_looking() -> AbstractContextManager[bool]:
    """During the ``with`` block, code on a CPU takes the branches of a GPU, which depend on no values."""
    return scoped(_looks_are_free, False)
