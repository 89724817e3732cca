"""What the value of a setting may be: one check for every kind of value."""

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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


def number(test: Callable[[float], bool], wanted: str, *, optional: bool = False) -> Check:
    """A finite number that passes a test, which ``wanted`` says in words; with ``optional`` also null."""
    wanted += ", or null" if optional else ""

    def check(value: Any) -> str | None:
        if value is None:
            return None if optional else f"give {wanted}"
        right = type(value) in (int, float) and math.isfinite(value) and test(value)
        return None if right else f"give {wanted}"

    return check


def several(each: Check, wanted: str) -> Check:
    """A list of at least one value that all pass a check."""

    def check(value: Any) -> str | None:
        right = _is_list(value) and len(value) > 0 and all(each(part) is None for part in value)
        return None if right else f"give {wanted}"

    return check


def one_or_more(each: Check, wanted: str) -> Check:
    """One value, or a list of at least one, that all pass a check."""

    def check(value: Any) -> str | None:
        given = value if _is_list(value) else [value]
        return None if given and all(each(part) is None for part in given) else f"give {wanted}"

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


def optional_text(value: Any) -> str | None:
    """A text that is not empty, or null."""
    return None if value is None or text(value) is None else "give a text, or null"


def optional_texts(value: Any) -> str | None:
    """A list of texts, or null."""
    right = value is None or (_is_list(value) and all(text(each) is None for each in value))
    return None if right else "give a list of texts, or null"


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


def optional_section(value: Any) -> str | None:
    """Settings by name, or none."""
    return (
        None
        if value is None or isinstance(value, Mapping)
        else "give a section, such as {enable_thinking: false}, or null"
    )


def pace(value: Any) -> str | None:
    """So many prompts, so much time, or never."""
    right = value is None or (type(value) is int and value >= 1)
    right = right or (isinstance(value, str) and re.fullmatch(r"[1-9]\d*[smh]", value) is not None)
    return None if right else "give a number of prompts, a time such as 30s or 5m, or null"


def anything(value: Any) -> str | None:
    """Checked where it is used."""
    return None


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
