"""Calls a drafter's own module (heads, an adapter) with packed weights that follow its parameters."""

from typing import Any

from torch import nn

from specdec.execution.eager import evaluating
from specdec.execution.freshness import Change, Freshness
from specdec.execution.locks import model_lock
from specdec.execution.packing import PackedLinears, packed_linears


class ModuleCaller:
    """Calls a module in evaluation mode; on a CPU its linear layers run on packed weights.

    Args:
        module: What to call.
        optimize: False calls the module's own code.
    """

    def __init__(self, module: nn.Module, *, optimize: bool = True):
        self.module = module
        self._freshness = Freshness(module)
        self._packed = packed_linears(module) if optimize else PackedLinears(nn.Identity())
        self._packing = self._packed.refresh()
        self._version = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with model_lock(self.module):
            self._look()
            with self._packed.in_use(), evaluating(self._freshness.training):
                return self.module(*args, **kwargs)

    @property
    def version(self) -> int:
        """A number that is larger than before if anything has changed about the module."""
        with model_lock(self.module):
            self._look()
        return self._version

    def _look(self) -> None:
        if self._freshness.expired():
            change = self._freshness.look()
            packing = self._packed.refresh(modules_changed=change is not Change.NONE)
            self._version += change is not Change.NONE or packing != self._packing
            self._packing = packing

    def weights_changed(self) -> None:
        """Pack all weights again, after a change that cannot be noticed (see ``Values``)."""
        self._packing = self._packed.refresh(all_values=True)
        self._version += 1
