"""A model is frozen while an engine serves it: a change that can be seen cheaply is refused, not followed silently.

``weights_changed`` (``Engine.weights_changed``) says that everything is to be read again.
"""

from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import Tensor, nn

from specdec.placement import is_spread

_epoch = 0


def weights_changed() -> None:
    """Have every engine of this process read its models again before the next forward."""
    global _epoch
    _epoch += 1


def epoch() -> int:
    """Return a number that is larger after ``weights_changed``."""
    return _epoch


class Frozen:
    """Notices cheap signs of a change: other modules or tensors, a write, a move, a hook of somebody else's.

    Writes through ``.data`` move no counter and go unnoticed. All modules, parameters and hooks may be ``known`` code;
    other code may keep a state whose changes a captured forward would not see.
    """

    def __init__(self, model: nn.Module):
        self._epoch, self._modules = _epoch, list(model.modules())
        self._hooks = [table for m in self._modules for table in (m._forward_hooks, m._forward_pre_hooks)]
        self._seen = [hook for table in self._hooks for hook in table.values()]
        kinds = [type(part) for m in self._modules for part in (m, *m._parameters.values()) if part is not None]
        self.known = all(map(_is_known, (*kinds, *self._seen))) and not any("forward" in vars(m) for m in self._modules)
        # accelerate's hooks put other tensors into the modules of a model that is spread, in every forward.
        modules = [] if is_spread(model) else self._modules
        tables = (table for m in modules for table in (m._modules, m._parameters))
        self._tables = [table for table in tables if table]
        # Rotary embeddings replace those of their buffers that are not saved.
        self._buffers = [(m._buffers, n) for m in modules for n in m._buffers if n not in m._non_persistent_buffers_set]
        self._objects = self._now()
        tensors = [object_ for object_ in self._objects if isinstance(object_, Tensor)]
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = list(map(_version, self._counted))
        self._ends = [*tensors[:1], *tensors[-1:]]  # moving a module leaves its parameters' identities alone
        self._places = list(map(_place, self._ends))

    @property
    def told(self) -> bool:
        """Whether somebody has said that weights changed since the model was read."""
        return self._epoch != _epoch

    def check(self, *, thoroughly: bool = True) -> None:
        """Refuse to go on with a model that has changed; unless ``thoroughly``, look for writes only (microseconds)."""
        change = self._other() if thoroughly else None
        if list(map(_version, self._counted)) != self._versions:
            change = "its weights were written to"
        if change is not None:
            raise ValueError(
                f"the {type(self._modules[0]).__name__} was changed while an engine serves it ({change}): call "
                f"Engine.weights_changed(), which reads the weights again"
            )

    def _other(self) -> str | None:
        """Return a change that is no write."""
        if sum(map(len, self._hooks)) != len(self._seen):
            # transformers watches hidden states by hooks that it adds when they are first wanted.
            hooks = [hook for table in self._hooks for hook in table.values()]
            if not all(_is_known(hook) or hook in self._seen for hook in hooks):
                return "a hook was added"
            self._seen = hooks
        now = self._now()
        if len(now) != len(self._objects) or not all(map(is_, now, self._objects)):
            return "another module or tensor is in it"
        return "it was moved" if list(map(_place, self._ends)) != self._places else None

    def _now(self) -> list[Any]:
        # Written for speed: this runs at every forward, over hundreds of objects, without a line of Python for each.
        return [*chain.from_iterable(map(_values, self._tables)), *(table.get(name) for table, name in self._buffers)]

    @property
    def training(self) -> list[nn.Module]:
        """The modules that are in training mode now."""
        return list(filter(_training, self._modules))


_values, _version, _training = methodcaller("values"), attrgetter("_version"), attrgetter("training")
_place = attrgetter("dtype", "device")

_OURS = ("torch", "transformers", "specdec", "drafters")


def _is_known(code: Any) -> bool:
    return (getattr(code, "__module__", None) or type(code).__module__).split(".")[0] in _OURS
