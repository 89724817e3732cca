"""Counts what a piece of code asks a device to do: operations, and moments at which the host waits for values.

On a GPU every counted operation is at least one kernel launch, and every read is a synchronization. Both can be counted
on a CPU, where the same code runs: so a test can say how many launches a round takes, and that the number does not
depend on lengths.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec.scoped import scoped


@dataclass
class Work:
    """How often each operation ran that computes something, and how often each call showed values to the host.

    Views and the making of empty tensors do not count.
    """

    operations: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        """The number of operations."""
        return self.operations.total()

    @property
    def synchronizations(self) -> int:
        """The number of times that the host asked for values."""
        return self.reads.total()


@contextmanager
def counted() -> Iterator[Work]:
    """Count the work of the ``with`` block, in this thread."""
    work = Work()
    told = ShowsValues(lambda name: work.reads.update([name]))
    with scoped(_counting, (*_counting.get(), work)), told, _Operations(work):
        yield work


def count_operation(name: str, times: int = 1) -> None:
    """Count an operation that torch does not know, because it is not torch's."""
    for work in _counting.get():
        work.operations[name] += times


# One per thread: who counts.
_counting: ContextVar[tuple[Work, ...]] = ContextVar("counting", default=())


_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}
_SHOWS_VALUES = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


class _Operations(TorchDispatchMode):
    def __init__(self, work: Work):
        super().__init__()
        self._work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if depends_on_values(func, args):
            self._work.reads[name] += 1
        elif _moves_to_host(name, args, outputs):
            self._work.reads[name] += 1
            self._work.operations[name] += 1
        elif name not in _FREE and not is_view(func):
            self._work.operations[name] += 1
        return outputs


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


def _moves_to_host(name: str, args: Any, outputs: Any) -> bool:
    if name != "_to_copy" and name != "copy_":
        return False
    given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    returned = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    source = given[-1] if name == "copy_" else given[0]
    return source.device.type != "cpu" and returned[0].device.type == "cpu"
