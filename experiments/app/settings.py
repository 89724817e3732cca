"""What a configuration may hold: the only place where its keys, types and ranges are checked, before any work starts.

Every application has a table of its settings (``RUN``, ``COMPARE``, …). Sections that describe a component
(``sampling``, ``drafter``, …) are checked against the component's own signature by ``check_arguments``.
"""

import difflib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

Check = Callable[[Any], str | None]
"""What to give instead of a value; None if the value is right."""


def integer(least: int, *, optional: bool = False) -> Check:
    """An integer from ``least`` on; with ``optional`` also null."""
    wanted = f"give an integer of at least {least}" + (", or null" if optional else "")

    def check(value: Any) -> str | None:
        if value is None and optional:
            return None
        return None if type(value) is int and value >= least else wanted  # not isinstance: true is no number

    return check


def number(test: Callable[[float], bool], wanted: str) -> Check:
    """A finite number that passes a test, which ``wanted`` says in words."""

    def check(value: Any) -> str | None:
        right = type(value) in (int, float) and math.isfinite(value) and test(value)
        return None if right else f"give {wanted}"

    return check


def several(each: Check, wanted: str) -> Check:
    """A list of at least one value that all pass a check."""

    def check(value: Any) -> str | None:
        right = _is_list(value) and len(value) > 0 and all(each(part) is None for part in value)
        return None if right else f"give {wanted}"

    return check


def one_of(*names: str) -> Check:
    """One of some words."""
    return lambda value: None if value in names else f"give one of {', '.join(names)}"


def flag(value: Any) -> str | None:
    """True or false."""
    return None if type(value) is bool else "give true or false"


def text(value: Any) -> str | None:
    """A text that is not empty."""
    return None if isinstance(value, str) and value else "give a text"


def folder(value: Any) -> str | None:
    """The path of a folder that is there, or can be made."""
    if text(value) is not None:
        return "give the path of a folder"
    path = Path(value).absolute()
    while not path.exists() and not path.is_symlink() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        return f"{path} is a file, give the path of a folder"
    return None if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written to, give another folder"


def section(value: Any) -> str | None:
    """Settings of their own, by name."""
    return None if isinstance(value, Mapping) else "give a section, such as one of the files in conf/"


def anything(value: Any) -> str | None:
    """Checked where it is used."""
    return None


STAGES = ("tokenizer", "target", "samples", "drafter", "medusa", "card")

ENGINE: dict[str, Check] = {
    "max_batch_size": integer(1),
    "max_length": integer(2, optional=True),
    "prefill_chunk": integer(1),
    "attention": text,
    "optimize": flag,
    "timing": flag,
    "scheduler": anything,
}
_MEASURING: dict[str, Check] = {
    "target": section,
    "verifier": section,
    "sampling": section,
    "dataset": section,
    "tracker": section,
    "engine": section,
    "bootstrap": section,
    "seed": integer(0, optional=True),
    "warmup_prompts": integer(0),
    "threads": integer(1, optional=True),
    "out": folder,
    "resume": flag,
    "trace": flag,
    "trace_dropped": number(lambda value: 0 <= value < 1, "a mass from 0 (keep every token) to below 1"),
    "chat_template": section,
}
RUN = {**_MEASURING, "drafter": section, "method": text}
DEMO = {
    **_MEASURING,
    "methods": section,
    "temperatures": several(number(lambda value: value >= 0, ""), "a list of temperatures, each 0 or above"),
}
COMPARE: dict[str, Check] = {"runs": anything, "allow_mixed": flag, "out": text}
REPLAY: dict[str, Check] = {
    "trace": text,
    "verifiers": anything,
    "baseline": text,
    "seed": integer(0),
    "threads": integer(1, optional=True),
    "out": folder,
    "bootstrap": section,
}
CHECK_VERIFIER: dict[str, Check] = {
    "verifier": section,
    "vocab": integer(2),
    "tables": integer(1),
    "seed": integer(0),
    "temperatures": several(number(lambda value: value > 0, ""), "at least one temperature, each above 0"),
    "streams": integer(100),
    "threshold": number(lambda value: value > 0, "a number above 0"),
}
TRAIN: dict[str, Check] = {
    "out": folder,
    "work": folder,
    "stages": several(one_of(*STAGES), f"a list of {', '.join(STAGES)}"),
    "seed": integer(0),
    "threads": integer(1),
    "mixed_precision": one_of("no", "bf16", "fp16"),
    "tokenizer": section,
    "target": section,
    "samples": section,
    "drafter": section,
    "medusa": section,
}


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
    """The end of a sentence about an unknown name: the nearest known one, or all of them."""
    listed = [str(each) for each in known]
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


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
