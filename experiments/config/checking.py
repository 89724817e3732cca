"""Arguments checked before any work starts, against the signature of what takes them: a component, or settings.

A signature says what a value may be: by its type, or by ``Annotated[int, Wanted(…)]`` with a condition in words. The
dataclasses of ``experiments.config.settings`` and the constructors of components are checked by the same function.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, Unpack, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Wanted:
    """A condition on a value, for ``Annotated``.

    Attributes:
        words: What to give, behind "give"; a function of the wrong value, or empty where the type says it.
        test: Whether a value of the right type is right.
    """

    words: str | Callable[[Any], str] = ""
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
            if is_dataclass(kind) and isinstance(value, Mapping):
                check_arguments(kind, value, f"{prefix}{name}")
            elif not _fits(value, kind):
                raise ValueError(f"{prefix}{name}={value!r}: give {in_words(kind, value)}")
        elif whole and _is_needed(parameter) and not (given_first and number == 0):
            raise ValueError(f"{prefix}{name} is missing: give {prefix}{name}=… (with + before it)")


_SIMPLE: dict[Any, Any] = {bool: (bool,), int: (int,), float: (int, float), str: (str,), NoneType: (NoneType,)}
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", NoneType: "null"}


def in_words(kind: Any, value: Any = None) -> str:
    """The values that an annotation allows, behind "give"."""
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        words = [each.words for each in parts[1:] if isinstance(each, Wanted) and each.words]
        return (words[0](value) if callable(words[0]) else words[0]) if words else in_words(parts[0], value)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if get_origin(kind) is list:
        return f"a list, each {in_words(parts[0], value)}"
    if get_origin(kind) in (Union, UnionType):
        return ", or ".join("a list of them" if _of_list(part) in parts else in_words(part, value) for part in parts)
    return "a section" if is_dataclass(kind) or kind is dict else _WORDS.get(kind, f"a {kind}")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is what an annotation allows; a type that is none of those below allows every value."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        conditions = [each for each in parts[1:] if isinstance(each, Wanted)]
        return _fits(value, parts[0]) and all(each.test(value) for each in conditions)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list | tuple) and all(_fits(each, parts[0]) for each in value)
    if kind is dict or is_dataclass(kind):
        return isinstance(value, Mapping)
    return kind not in _SIMPLE or type(value) in _SIMPLE[kind]  # not isinstance: true is no number


def _of_list(kind: Any) -> Any:
    """The type of a list's elements, as in ``int | list[int]``; an ellipsis for anything else."""
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return get_args(bare)[0] if get_origin(bare) is list else ...


def parameters_of(component: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a component, with those that ``**options: Unpack[…]`` stands for."""
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(component).parameters.items():
        if get_origin(parameter.annotation) is Unpack:
            hints = get_type_hints(get_args(parameter.annotation)[0], include_extras=True)
            only = inspect.Parameter.KEYWORD_ONLY
            found |= {key: inspect.Parameter(key, only, default=None, annotation=kind) for key, kind in hints.items()}
        else:
            found[name] = parameter
    return found


def _passed_on(component: Any) -> dict[str, inspect.Parameter]:
    """The parameters that a subclass adds to its constructor, for an inherited class method that passes options on."""
    kind = getattr(component, "__self__", None)
    passes = any(get_origin(each.annotation) is Unpack for each in inspect.signature(component).parameters.values())
    if not isinstance(kind, type) or not passes:
        return {}
    maker = next(each for each in kind.__mro__ if component.__name__ in vars(each))
    own, known = inspect.signature(kind).parameters, inspect.signature(maker).parameters
    return {name: each for name, each in own.items() if each.kind is each.KEYWORD_ONLY and name not in known}


def _is_needed(parameter: inspect.Parameter) -> bool:
    named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return named and parameter.default is parameter.empty
