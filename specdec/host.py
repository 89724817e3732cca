"""Knows whether the host may look at a tensor's values without waiting for a device."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_looks_are_free: ContextVar[bool] = ContextVar("looks_are_free", default=True)


def can_look(tensor: Tensor) -> bool:
    """Returns whether reading a value of this tensor is free. On a GPU it would make the host wait."""
    return _looks_are_free.get() and tensor.device.type == "cpu"


@contextmanager
def without_looking() -> Iterator[None]:
    """During the ``with`` block, code on a CPU takes the branches that it would take on a GPU.

    What runs then does not depend on values, so that it can be recorded (``specdec.execution.recording``).
    """
    token = _looks_are_free.set(False)
    try:
        yield
    finally:
        _looks_are_free.reset(token)
