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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with model_lock(self.module):
            if self._freshness.expired():
                self._packed.refresh(modules_changed=self._freshness.look() is not Change.NONE)
            with self._packed.in_use(), evaluating(self._freshness.training):
                return self.module(*args, **kwargs)

    def weights_changed(self) -> None:
        """Pack all weights again, after a change that cannot be noticed (see ``Values``)."""
        self._packed.refresh(all_values=True)
