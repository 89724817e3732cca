"""Kinds of values that settings may have, and the check of arguments against what takes them.

A signature says what a value may be: by its type, or by ``Annotated[int, Wanted(…)]`` with a condition in words. The
settings of commands (dataclasses) and the constructors of components are checked by the same function, before any work.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

from experiments.reporting.formats import FORMATS
from experiments.results.limits import seconds_of

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """A condition on a value, for ``Annotated``: what to give, unless the type says it, and the test of a value."""

    words: str = ""
    test: Callable[[Any], bool] = lambda value: True


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence about an unknown name: the nearest known one, or all of them, or that there is none."""
    listed = [str(each) for each in known]
    if not listed:
        return ", and nothing else can be set here"
    near = difflib.get_close_matches(name, listed, n=1)
    return f": did you mean {prefix}{near[0]}?" if near else f": choose among {', '.join(listed)}"


def check_arguments(component: Any, options: Mapping[str, Any], within: str = "", *, given_first: bool = False) -> None:
    """Check arguments by name against the signature of what takes them.

    Args:
        options: Its arguments. ``_args_`` and ``_partial_`` are Hydra's.
        given_first: Whether the first argument comes from elsewhere.

    Raises:
        ValueError: An argument is unknown, missing, or not what its annotation allows.
    """
    parameters = parameters_of(component) | _passed_on(component)
    prefix = f"{within}." if within else ""
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in options:
            if name not in parameters and not name.startswith("_"):
                raise ValueError(f"there is no {prefix}{name}{did_you_mean(name, parameters, prefix)}")
    whole = "_args_" not in options and not options.get("_partial_")
    for number, (name, parameter) in enumerate(parameters.items()):
        if name in options:
            value, kind = options[name], parameter.annotation
            sections = [part for part in (kind, *get_args(kind)) if isinstance(part, type) and is_dataclass(part)]
            if sections and isinstance(value, Mapping):
                check_arguments(sections[0], value, f"{prefix}{name}")
            elif not _fits(value, kind):
                raise ValueError(f"{prefix}{name}={value!r}: give {in_words(kind)}")
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or (given_first and number == 0):
            continue
        elif whole and parameter.default is parameter.empty:
            raise ValueError(f"{prefix}{name} is missing: give {prefix}{name}=… (with + before it)")


_SIMPLE: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("an integer", (int,)),
    float: ("a number", (int, float)),
    str: ("text", (str,)),
    NoneType: ("null", (NoneType,)),
}


def in_words(kind: Any) -> str:
    """The values that an annotation allows, behind "give"."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return next((part.words for part in parts[1:] if isinstance(part, Wanted) and part.words), in_words(parts[0]))
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin is list:
        return f"a list, each {in_words(parts[0])}"
    if origin in (Union, UnionType):
        return ", or ".join(map(in_words, parts))
    return "a section" if is_dataclass(kind) or kind is dict else _SIMPLE.get(kind, (f"a {kind}",))[0]


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is what an annotation allows; a type that is none of those below allows every value."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _fits(value, parts[0]) and all(part.test(value) for part in parts[1:] if isinstance(part, Wanted))
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list | tuple) and all(_fits(element, parts[0]) for element in value)
    if kind is dict or is_dataclass(kind):
        return isinstance(value, Mapping)
    return kind not in _SIMPLE or type(value) in _SIMPLE[kind][1]  # not isinstance: true is no number


def parameters_of(component: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a component, with those that ``**options`` stands for: ``Unpack[…]``, or the base class's."""
    bases = component.__mro__[1:-1] if isinstance(component, type) else ()
    base = next((base for base in bases if "__init__" in vars(base)), None)
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(component).parameters.items():
        if get_origin(parameter.annotation) is Unpack:
            hints = get_type_hints(get_args(parameter.annotation)[0], include_extras=True)
            only = inspect.Parameter.KEYWORD_ONLY
            found |= {key: inspect.Parameter(key, only, default=None, annotation=kind) for key, kind in hints.items()}
        elif parameter.kind is parameter.VAR_KEYWORD and base is not None:
            found |= parameters_of(base)
        else:
            found[name] = parameter
    return found


def _passed_on(component: Any) -> dict[str, inspect.Parameter]:
    """The parameters that a subclass adds to its constructor, for an inherited class method that passes options on."""
    kind = getattr(component, "__self__", None)
    passes = any(get_origin(each.annotation) is Unpack for each in inspect.signature(component).parameters.values())
    if not isinstance(kind, type) or not passes:
        return {}
    maker = next(base for base in kind.__mro__ if component.__name__ in vars(base))
    own, known = inspect.signature(kind).parameters, inspect.signature(maker).parameters
    return {name: each for name, each in own.items() if each.kind is each.KEYWORD_ONLY and name not in known}


def least(smallest: int) -> Wanted:
    """An integer of at least so much."""
    return Wanted(f"an integer of at least {smallest}", lambda value: value >= smallest)


def number(words: str, test: Callable[[float], bool]) -> Wanted:
    """A finite number that passes a test."""
    return Wanted(words, lambda value: math.isfinite(value) and test(value))


def _is_time(value: Any) -> bool:
    try:
        seconds_of(value)
    except ValueError:
        return False
    return True


Several = Annotated[list[T], Wanted(test=bool)]
OneOrMore = T | Annotated[list[T], Wanted(test=bool)]
Natural = Annotated[int, least(0)]
Count = Annotated[int, least(1)]
Two = Annotated[int, least(2)]
Text = Annotated[str, Wanted("a text", bool)]
Texts = Annotated[list[Text], Wanted("a list of texts")] | None
Section = Annotated[dict, Wanted("a section, such as one of the files in conf/")]
Positive = Annotated[float, number("a number above 0", lambda value: value > 0)]
AtLeastZero = Annotated[float, number("a number of 0 or more", lambda value: value >= 0)]
Probability = Annotated[float, number("a probability from 0 to 1", lambda value: 0 <= value <= 1)]
Share = Annotated[float, number("a share from 0 to below 1", lambda value: 0 <= value < 1)]
Temperatures = Annotated[list[AtLeastZero], Wanted("a list of temperatures, each 0 or above", bool)]
Duration = Annotated[Any, Wanted("seconds, or a time with its unit, such as 200ms", _is_time)] | None
Format = Annotated[str, Wanted(f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}", lambda value: value in FORMATS)]
Runs = Annotated[OneOrMore[Text], Wanted("folders of runs or of sweeps, or a pattern, as 'runs=[FOLDER,FOLDER]'")]
