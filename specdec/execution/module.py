"""Calls a drafter's own module (heads, an adapter) on packed weights."""

from typing import Any

from torch import nn

from specdec.execution.executor import evaluating, model_lock
from specdec.execution.frozen import Frozen
from specdec.execution.packing import PackedLinears


class ModuleCaller:
    """Calls a module in evaluation mode; on a CPU its linear layers run on packed weights if ``optimize``."""

    def __init__(self, module: nn.Module, *, optimize: bool = True):
        self.module = module
        self._frozen = Frozen(module)
        self._packed = PackedLinears(module if optimize else nn.Identity())
        self._version = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with model_lock(self.module):
            self._look()
            with self._packed.in_use(), evaluating(self._frozen.training):
                return self.module(*args, **kwargs)

    @property
    def version(self) -> int:
        """A number that is larger than before if the module's weights were read again."""
        with model_lock(self.module):
            self._look()
        return self._version

    def _look(self) -> None:
        if self._frozen.told:
            self._frozen.renew()
            self._packed.refresh()
            self._version += 1
        else:
            self._frozen.check()
