"""Knows what the host may look at without waiting for a device."""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NoReturn

import numpy as np
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


class NotKnownError(RuntimeError):
    """Code that runs on the device alone asked for a number that only the host would know."""


class Unknown(np.ndarray):
    """Stands for numbers that the host does not have while a round is recorded: any use is an error."""

    def __new__(cls) -> "Unknown":
        return np.zeros(0).view(cls)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotKnownError(
        "the host's numbers (host_lengths and the like) are not known in a recorded round: use the tensors"
    )


for _name in (
    *("__array_ufunc__", "__array_function__", "__array__", "__getitem__", "__len__", "__iter__", "__bool__"),
    *("max", "min", "any", "all", "sum", "tolist", "astype", "copy", "item", "tobytes", "nonzero"),
):
    setattr(Unknown, _name, _refuse)
