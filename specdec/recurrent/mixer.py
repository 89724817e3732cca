"""A recurrent layer as a value: the states that it keeps from token to token, and how it may be called."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import Cache as TransformersCache

from specdec.cache.states import StateKey, StateShape, StateView

Forward = Callable[..., Any]
Given = tuple[tuple[Any, ...], dict[str, Any]]  # positional and named arguments of a call
Path = tuple[int | str, ...]  # where something stands in nested tuples, lists and dicts


@dataclass(frozen=True, eq=False)
class Mixer:
    """A module, by its name, that mixes a row's tokens by states which it keeps in the cache, or in attributes.

    Attributes:
        states: What it keeps for one row.
        takes: Where its arguments (``Given``) have a tensor that begins with ``[batch, node]``.
        gives: Where its result has one.
        one_by_one: Whether it is right behind a state only if it is given a single token.
        projections: Its linear layers that see every token by itself and run before any state is read, in order.
        last: The linear layer whose output is the result, and where that stands in it; None if there is none.
    """

    name: str
    states: Mapping[StateKey, StateShape]
    takes: tuple[Path, ...]
    gives: tuple[Path, ...]
    one_by_one: bool = True
    projections: tuple[str, ...] = ()
    last: tuple[str, Path] | None = None

    def attributes(self, model: nn.Module) -> dict[StateKey, tuple[nn.Module, str]]:
        """Return the module and the name of every state that is kept in an attribute."""
        keys = [key for key in self.states if key.kind == "attribute"]
        return {key: (model.get_submodule(str(key.owner)), str(key.which)) for key in keys}

    def call(
        self, model: nn.Module, forward: Forward, given: Given, view: StateView
    ) -> tuple[Any, dict[StateKey, Tensor]]:
        """Return the result of the layer's own ``forward`` for some tokens, before which ``view``, and its states."""
        attributes = self.attributes(model)
        for key, (module, name) in attributes.items():
            setattr(module, name, view.state(key))
        args = (view if isinstance(each, TransformersCache) else each for each in given[0])
        kwargs = {name: view if isinstance(each, TransformersCache) else each for name, each in given[1].items()}
        result = forward(*args, **kwargs)
        for key, (module, name) in attributes.items():
            view.now[key] = getattr(module, name)
        return result, {key: view.now[key] for key in self.states}

    @contextmanager
    def attributes_kept(self, model: nn.Module) -> Iterator[None]:
        """Put the attributes that hold states back after the ``with`` block."""
        before = [(module, name, getattr(module, name)) for module, name in self.attributes(model).values()]
        try:
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)


@contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Replace the forwards of modules during the ``with`` block."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, own in before.items():
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own


def tensors_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield all tensors of a nested value with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from tensors_in(part, (*path, name))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, part in enumerate(value):
            yield from tensors_in(part, (*path, index))


def part_at(value: Any, path: Path) -> Any:
    """Return what stands at a path."""
    for step in path:
        value = value[step]
    return value


def replaced(value: Any, parts: Mapping[Path, Any], path: Path = ()) -> Any:
    """Return a nested value with other parts at some paths; what has none of them is the same object."""
    if path in parts:
        return parts[path]
    if not any(other[: len(path)] == path for other in parts):
        return value
    if isinstance(value, Mapping):
        return {name: replaced(part, parts, (*path, name)) for name, part in value.items()}
    rebuilt = [replaced(part, parts, (*path, index)) for index, part in enumerate(value)]
    return rebuilt if isinstance(value, list) else tuple(rebuilt)
