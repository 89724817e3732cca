"""What an operation asks of its host: views and values; and the count of operations that torch does not know."""

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

# One per thread: who counts, each by the operation's name.
counting: ContextVar[tuple[Counter[str], ...]] = ContextVar("counting", default=())

_SHOWS_VALUES = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


def count_operation(name: str, times: int = 1) -> None:
    """Count an operation that torch does not know, because it is not torch's."""
    for operations in counting.get():
        operations[name] += times


class ShowsValues(TorchFunctionMode):
    """Calls a function with the name of each call that shows values without being an operation."""

    def __init__(self, told: Callable[[str], object]):
        super().__init__()
        self._told = told

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SHOWS_VALUES:
            self._told(func.__name__)
        return func(*args, **(kwargs or {}))


def depends_on_values(function: OpOverload, arguments: Any) -> bool:
    """Return whether the host must know values before it can go on: it reads them, or they decide about a shape."""
    if function is torch.ops.aten.index.Tensor:  # which torch marks whatever the index
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1])
    return _is_marked(function)


@cache  # to compare torch's tags takes a millisecond
def _is_marked(function: OpOverload) -> bool:
    return torch.Tag.data_dependent_output in function.tags or torch.Tag.dynamic_output_shape in function.tags


def is_view(func: OpOverload) -> bool:
    """Return whether an operation only looks at its first argument's memory in another way."""
    returned = func._schema.returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)
