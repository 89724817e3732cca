"""Has a component what the engine reads of it? If not: one sentence that says what is missing, and what to write."""

import dis
import operator
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from inspect import isfunction, unwrap
from typing import Any

from specdec.arguments import instance
from specdec.interfaces import Drafter, Session, Verifier
from specdec.types import DraftSampling, Exactness, Noise


@dataclass(frozen=True)
class _Wanted:
    """One attribute: the test of its value, what to give instead, and a line that shows how to write it."""

    right: Callable[[Any], bool]
    give: str
    example: str


def _count(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= 0
    except TypeError:
        return False


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _samplings(value: Any) -> bool:
    return isinstance(value, Set) and all(isinstance(law, DraftSampling) for law in value)


def _layers(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(type(layer) is int for layer in value)


_SAMPLINGS = "give a frozenset of DraftSampling", "frozenset({DraftSampling.DETERMINISTIC})"

DRAFTER: Mapping[str, _Wanted] = {
    "max_nodes": _Wanted(_count, "give the largest number of drafted nodes in a row", "max_nodes = 4"),
    "max_depth": _Wanted(_count, "give the largest depth of a node", "max_depth = 4"),
    "laws": _Wanted(_samplings, _SAMPLINGS[0], f"laws = {_SAMPLINGS[1]}"),
    "is_chain": _Wanted(_flag, "give True if no node ever has two children, else False", "is_chain = True"),
    "is_paths": _Wanted(_flag, "give True or False", "is_paths = False"),
    "has_leaf_probs": _Wanted(_flag, "give True or False", "has_leaf_probs = False"),
    "adapts": _Wanted(_flag, "give True or False", "adapts = False"),
}
"""What the engine reads of a drafter."""

SESSION: Mapping[str, _Wanted] = {
    "reads_host": _Wanted(_flag, "give True if it reads batch.host or outcome.host, else False", "reads_host = True"),
    "hidden_layers": _Wanted(_layers, "give a tuple of numbers of layers", "hidden_layers = (-1,)"),
    "top_tokens": _Wanted(_count, "give a count of tokens", "top_tokens = 0"),
}
"""What the engine reads of a drafting session."""

VERIFIER: Mapping[str, _Wanted] = {
    "exactness": _Wanted(
        lambda value: isinstance(value, Exactness), "give an Exactness", "exactness = Exactness.EXACT"
    ),
    "samplings": _Wanted(_samplings, _SAMPLINGS[0], f"samplings = {_SAMPLINGS[1]}"),
    "chain_only": _Wanted(_flag, "give True or False", "chain_only = False"),
    "paths_only": _Wanted(_flag, "give True or False", "paths_only = False"),
    "noise": _Wanted(lambda value: isinstance(value, Noise), "give a Noise", "noise = Noise.FRESH"),
    "needs_leaf_probs": _Wanted(_flag, "give True or False", "needs_leaf_probs = False"),
}
"""What the engine reads of an acceptance rule."""


_METHODS: dict[str, str] = {
    "bind": "bind(self, target, sizes), which checks the target and returns a Session with the state of one engine",
    "propose": "propose(self, batch), which returns a DraftTree with a row for every row of batch",
    "laws": "laws(self, tree, target_probs), which returns Laws: where the path ends, and what follows it",
}
"""The methods that a component must have, in words."""


def missing_methods(component: type) -> str | None:
    """Return a sentence on the methods that a class lacks, so that it cannot be made; None if it lacks none."""
    missing: list[str] = sorted(getattr(component, "__abstractmethods__", ()))
    if not missing:
        return None
    write = " and ".join(_METHODS.get(name, name) for name in missing)
    return f"{component.__name__} has no {' and no '.join(missing)}: write {write}"


def check_drafter_attributes(drafter: Drafter) -> None:
    """Refuse a drafter that lacks an attribute, or has a wrong one."""
    _check(drafter, DRAFTER, base=Drafter)
    if not drafter.laws:
        raise ValueError(
            f"{type(drafter).__name__}.laws is empty: name the laws by which it draws, "
            f"such as {DRAFTER['laws'].example}"
        )


def check_session(session: Any, drafter: Drafter, *, layers: int | None = None) -> None:
    """Refuse a session that is none, that lacks an attribute, or has a wrong one."""
    instance(f"{type(drafter).__name__}.bind(…)", session, Session, "a Session with the state of one engine")
    _check(session, SESSION, base=Session)
    name = type(session).__name__
    wrong = [layer for layer in session.hidden_layers if layers is not None and not -1 <= layer <= layers]
    if wrong:
        raise ValueError(
            f"{name}.hidden_layers names layer {wrong[0]} and the target has {layers} layers: give numbers from 0 to "
            f"{layers}, or -1 for the last hidden state"
        )


def check_verifier_attributes(verifier: Verifier) -> None:
    """Refuse an acceptance rule that lacks an attribute, or has a wrong one."""
    _check(verifier, VERIFIER, base=Verifier)


def _check(component: Drafter | Session | Verifier, wanted: Mapping[str, _Wanted], *, base: type) -> None:
    name = type(component).__name__
    missing = [key for key in wanted if not hasattr(component, key)]
    unmade = _unmade(component, base)
    if unmade is not None and (missing or _reads_of(component, unmade)):
        lacks = missing or _reads_of(component, unmade)
        raise ValueError(
            f"{name} has no {' and no '.join(lacks)}, which the constructor of {unmade.__name__} sets: call "
            f"super().__init__(…) in the constructor of {name}"
        )
    if missing:
        lines = "; ".join(wanted[key].example for key in missing)
        raise ValueError(f"{name} has no {' and no '.join(missing)}: write into the class, for example, {lines}")
    for key, attribute in wanted.items():
        value = getattr(component, key)
        if not attribute.right(value):
            raise ValueError(f"{name}.{key}={value!r}: {attribute.give}, such as {attribute.example}")


def _unmade(component: Drafter | Session | Verifier, base: type) -> type | None:
    """Return the class whose constructor sets attributes of which this component has none; None if there is none."""
    for parent in type(component).__mro__[1:]:
        if parent is base:
            return None
        stored = _stored(parent)
        if stored and not any(hasattr(component, key) for key in stored):
            return parent
    return None


def _stored(parent: type) -> set[str]:
    """Return the names of the attributes that a class's own constructor assigns."""
    constructor = vars(parent).get("__init__")
    if constructor is None or not isfunction(unwrap(constructor)):
        return set()
    return {line.argval for line in dis.get_instructions(unwrap(constructor)) if line.opname == "STORE_ATTR"}


def _reads_of(component: Drafter | Session | Verifier, parent: type) -> list[str]:
    """Return which of the attributes that a class's constructor assigns are read by methods that are still in use."""
    stored = _stored(parent)
    reads: set[str] = set()
    for name in dir(type(component)):
        method = getattr(type(component), name)
        if name != "__init__" and isfunction(method) and isfunction(unwrap(method)):
            reads.update(unwrap(method).__code__.co_names)
    return sorted(stored & reads)
