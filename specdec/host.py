"""Knows what the host may look at without waiting for a device."""

from contextlib import AbstractContextManager
from contextvars import ContextVar

from torch import Tensor

from specdec.scoped import scoped

_looks_are_free: ContextVar[bool] = ContextVar("looks_are_free", default=True)


def can_look(tensor: Tensor) -> bool:
    """Returns whether reading a value of this tensor is free. On a GPU it would make the host wait."""
    return _looks_are_free.get() and tensor.device.type == "cpu"


def without_looking() -> AbstractContextManager[bool]:
    """During the ``with`` block, code on a CPU takes the branches that it would take on a GPU.

    What runs then does not depend on values, so that it can be recorded (``specdec.execution.recorder``).
    """
    return scoped(_looks_are_free, False)
