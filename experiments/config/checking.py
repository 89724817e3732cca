"""A configuration checked before any work starts: against a table of settings, or against a component's signature."""

import difflib
import inspect
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, get_args

from experiments.config.values import Check


def check_settings(given: Mapping[str, Any], known: Mapping[str, Check], *, within: str = "") -> None:
    """Check the values of a configuration, or of one section of it.

    Args:
        given: The resolved values.
        known: A check for every setting that there is.
        within: Name of the section, for messages.

    Raises:
        ValueError: A setting is unknown, missing or wrong. Says what was given and what to give.
    """
    prefix = f"{within}." if within else ""
    for name in given:
        if name not in known:
            raise ValueError(f"there is no {prefix}{name}{did_you_mean(str(name), known, prefix)}")
    for name, check in known.items():
        if name not in given:
            raise ValueError(f"{prefix}{name} is missing: give {prefix}{name}=…")
        wanted = check(given[name])
        if wanted is not None:
            raise ValueError(f"{prefix}{name}={given[name]!r}: {wanted}")


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence about an unknown name: the nearest known one, or all of them, or that there is none."""
    listed = [str(each) for each in known]
    if not listed:
        return ", and nothing else can be set here"
    near = difflib.get_close_matches(name, listed, n=1)
    return f": did you mean {prefix}{near[0]}?" if near else f": choose among {', '.join(listed)}"


_SIMPLE: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (str,),
    NoneType: (NoneType,),
}
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", NoneType: "null"}


def check_arguments(component: Any, options: Mapping[str, Any], within: str) -> None:
    """Check a section against the signature of the component that it describes.

    Args:
        component: A class or function.
        options: Its arguments, by name.
        within: Name of the section, for messages.

    Raises:
        ValueError: The component has no such argument, or asks for a value of another simple type.
    """
    parameters = inspect.signature(component).parameters
    prefix = f"{within}." if within else ""
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in options:
            if name not in parameters and not name.startswith("_"):
                raise ValueError(f"there is no {prefix}{name}{did_you_mean(name, parameters, prefix)}")
    for name, parameter in parameters.items():
        annotation = parameter.annotation
        kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        if name not in options or any(kind not in _SIMPLE for kind in kinds):
            continue
        allowed = {accepted for kind in kinds for accepted in _SIMPLE[kind]}
        if type(options[name]) not in allowed:  # not isinstance: true is no number
            wanted = " or ".join(_WORDS[kind] for kind in kinds)
            raise ValueError(f"{prefix}{name}={options[name]!r}: give {wanted}")
