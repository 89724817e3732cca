"""Notices that a model has changed since something was derived from it.

Packed weights, captured forwards and plans are made from a model that its owner may go on to train, move, or change in
its modules or configuration. ``Freshness`` compares what can be compared quickly. It looks whenever a forward begins,
but only once within ``steady``, where nothing but this project's code runs.
"""

import copy
import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

_SIMPLE = (bool, int, float, str, type(None))


class Change(enum.IntEnum):
    """What has changed about a model since the last look; a larger value includes the smaller ones."""

    NONE = 0
    PARTS = 1
    """Its parameters or their values, its buffers, hooks or modes."""
    STRUCTURE = 2
    """Its modules, their settings, its configuration, dtype or device."""


class Versioned(ABC):
    """A module that multiplies by something derived from its parameters, such as a quantized layer."""

    @abstractmethod
    def version(self) -> tuple[object, ...]:
        """Returns a value that differs after those parameters have been replaced or changed in place.

        Whatever keeps a tensor that a forward multiplied by (a captured forward, say) must drop it then. Writes through
        ``.data`` go unnoticed.
        """


class _Region(threading.local):
    token: object | None = None


_region = _Region()


@contextmanager
def steady() -> Iterator[None]:
    """Promise that no model changes during the ``with`` block, so that each is looked at once."""
    before = _region.token
    if before is None:
        _region.token = object()
    try:
        yield
    finally:
        _region.token = before


class Freshness:
    """Looks at what a module is made of: its modules, the identity of its tensors, hooks, modes and configurations.

    Args:
        model: What to look at; it is not kept alive.

    Attributes:
        modules: All modules, as of the last look.
        training: The modules that are in training mode.
        known: Whether all modules, parameters and hooks are code of torch, transformers or this project. Other code may
            keep a state whose changes a captured forward would not see.
    """

    def __init__(self, model: nn.Module):
        self._model = ref(model)
        self._looked: object | None = None
        self._note(model)

    def look(self) -> Change:
        """Returns what has changed since the last look, except the values of parameters (see ``Values``)."""
        token = _region.token
        if token is not None and token is self._looked:
            return Change.NONE
        self._looked = token
        if not self._same_structure() or not self._same_settings():
            change = Change.STRUCTURE
        elif not self._same_parts():
            change = Change.PARTS
        else:
            return Change.NONE
        model = self._model()
        assert model is not None, "whoever looks holds the model"
        self._note(model)
        return change

    def expired(self) -> bool:
        """Returns whether the next ``look`` will really look."""
        token = _region.token
        return token is None or token is not self._looked

    def _note(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.training = [module for module in self.modules if module.training]
        self.known = all_known(self.modules)
        self._names = [vars(module) for module in self.modules]
        self._tables = _Contents(table for module in self.modules for table in _tables(module))
        self._children = _Contents(module._modules for module in self.modules)
        self._versioned = [module for module in self.modules if isinstance(module, Versioned)]
        self._scalars = [(vars(module), name) for module in self.modules for name in _scalar_names(module)]
        configs = {id(c): c for c in (getattr(m, "config", None) for m in self.modules) if c is not None}
        self._settings = [vars(config) for config in configs.values() if isinstance(config, PreTrainedConfig)]
        # Moving a module to another dtype or device leaves its parameters' identities alone.
        parameters = list(model.parameters())
        self._anchors = [*parameters[:1], *parameters[-1:]]
        self._known_modes, self._known_versions = self._modes(), self._versions()
        self._known_sizes, self._known_constants = list(map(len, self._names)), self._constants()
        # Configurations within a configuration that some module reads are in the list themselves.
        self._known_settings = [
            {name: each if isinstance(each, PreTrainedConfig) else copy.deepcopy(each) for name, each in names.items()}
            for names in self._settings
        ]

    # Written for speed: these run at every look, over hundreds of objects, without a line of Python for each.

    def _same_parts(self) -> bool:
        """Returns whether tensors, hooks and modes are those of the last look."""
        return (
            self._tables.are_the_same()
            and self._modes() == self._known_modes
            and self._versions() == self._known_versions
        )

    def _same_structure(self) -> bool:
        """Returns whether modules and their settings are those of the last look."""
        return (
            self._children.are_the_same()
            and list(map(len, self._names)) == self._known_sizes
            and self._constants() == self._known_constants
        )

    def _same_settings(self) -> bool:
        return self._settings == self._known_settings

    def _modes(self) -> list[bool]:
        return list(map(_training, self.modules))

    def _versions(self) -> list[object]:
        return [module.version() for module in self._versioned]

    def _constants(self) -> list[object]:
        """Returns what becomes a constant in a captured forward, and where parameters are."""
        places = [(anchor.dtype, anchor.device) for anchor in self._anchors]
        return [*[names.get(name) for names, name in self._scalars], *places]


_training = attrgetter("training")
_values = methodcaller("values")


class _Contents:
    """Notices that a table holds other values than at first.

    Args:
        tables: The tables; most of a module's are empty. They are dictionaries, or a library's mappings in their place.
    """

    def __init__(self, tables: Iterable[Mapping[Any, Any]]):
        tables = list(tables)
        self._empty = [table for table in tables if not table]
        self._filled = [table for table in tables if table]
        self._values = self._now()  # they stay alive, so that none is mistaken for another

    def are_the_same(self) -> bool:
        """Returns whether every table holds the very objects that it did."""
        if any(self._empty):
            return False
        now = self._now()
        return len(now) == len(self._values) and all(map(is_, now, self._values))

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(map(_values, self._filled)))


def _tables(module: nn.Module) -> tuple[Mapping[Any, Any], ...]:
    return module._parameters, module._buffers, module._forward_hooks, module._forward_pre_hooks


def _scalar_names(module: nn.Module) -> list[str]:
    """Returns the attributes that become constants in a captured forward. In torch's own modules they do not change."""
    if type(module).__module__.startswith("torch."):
        return []
    skipped = ("training",)
    simple = [name for name, value in vars(module).items() if isinstance(value, _SIMPLE)]
    return [name for name in simple if name not in skipped and not name.startswith("_")]


OURS = ("torch", "transformers", "specdec", "drafters")


def all_known(modules: Iterable[nn.Module]) -> bool:
    """Returns whether all modules, their parameters' classes, and all hooks on them, are known code."""
    for module in modules:
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        kinds = [type(parameter) for parameter in module._parameters.values() if parameter is not None]
        if any(_home(code) not in OURS for code in (type(module), *kinds, *hooks)) or "forward" in vars(module):
            return False
    return True


def _home(code: Any) -> str:
    return (getattr(code, "__module__", None) or type(code).__module__).split(".")[0]


class Values:
    """Looks at the values of some tensors: their storage, their version counters, and a few of their numbers.

    Numbers are compared because fused optimizers and writes to ``.data`` move no counter. A write to ``.data`` that
    leaves all sampled numbers as they were goes unnoticed and must be reported (``weights_changed``).

    Args:
        tensors: What to look at.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self._tensors = list(tensors)
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._note()

    def changed(self) -> bool:
        """Returns whether any tensor has changed since the last look."""
        if self._counters() == self._known_counters and torch.equal(self._numbers(), self._known_numbers):
            return False
        self._note()
        return True

    def _note(self) -> None:
        self._samples = [_sample(tensor) for tensor in self._tensors]
        self._known_counters = self._counters()
        self._known_numbers = self._numbers()

    def _counters(self) -> tuple[list[int], list[int], list[torch.dtype]]:
        return (
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(_version, self._counted)),
            list(map(_dtype, self._tensors)),
        )

    def _numbers(self) -> Tensor:
        if not self._samples:
            return torch.empty(0)
        # As integers: NaN differs from itself.
        return torch.cat(self._samples).float().view(torch.int32)


_version, _dtype = attrgetter("_version"), attrgetter("dtype")
_SAMPLED = 5


def _sample(tensor: Tensor) -> Tensor:
    """Returns a view of a few numbers, spread from the first to the last."""
    flat = tensor.detach()
    if tensor.is_contiguous():
        flat = flat.view(-1)
        return flat[:: max(1, (flat.numel() - 1) // (_SAMPLED - 1))]
    return flat.select(0, 0).reshape(-1)[:1] if flat.numel() else flat.reshape(-1)
