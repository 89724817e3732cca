"""Counts what a piece of code asks a device to do: operations, and moments at which the host waits for values.

On a GPU every counted operation is at least one kernel launch, and every read is a synchronization. Both can be counted
on a CPU, where the same code runs: so a test can say how many launches a round takes, and that the number does not
depend on lengths.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from specdec.counting import ShowsValues, counting, depends_on_values, is_view
from specdec.host import scoped

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}


@dataclass
class Work:
    """How often each operation ran that computes something, and how often each call showed values to the host."""

    operations: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        return self.operations.total()

    @property
    def synchronizations(self) -> int:
        return self.reads.total()


@contextmanager
def counted() -> Iterator[Work]:
    """Count the work of the ``with`` block, in this thread."""
    work = Work()
    told = ShowsValues(lambda name: work.reads.update([name]))
    with scoped(counting, (*counting.get(), work.operations)), told, _Operations(work):
        yield work


class _Operations(TorchDispatchMode):
    def __init__(self, work: Work):
        super().__init__()
        self._work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if depends_on_values(func, args):
            self._work.reads[name] += 1
        elif name not in FREE and not is_view(func):
            self._work.operations[name] += 1
        return func(*args, **(kwargs or {}))
