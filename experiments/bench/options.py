"""``name=value`` words as the fields of a dataclass, as the experiments take them, without Hydra.

A list is written ``[a,b]``; nothing at all, ``null``. It needs the standard library only.
"""

import dataclasses
import difflib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, cast, get_args, get_origin

Options = TypeVar("Options")

_KINDS: dict[Any, tuple[Any, str, str]] = {
    int: (int, "an integer", "a list of integers, such as [1,2]"),
    float: (float, "a number", "a list of numbers, such as [1,2]"),
    bool: (lambda text: {"true": True, "false": False}[text.lower()], "true or false", ""),
    str: (str, "a text", "a list of texts, such as [a,b]"),
    Path: (lambda text: Path(text).expanduser(), "a path", ""),
}
"""By type: how a word is read, and what is asked for where it cannot be, for one and for several."""


def option(default: Any, text: str, *, least: int | None = None, choices: Sequence[object] = ()) -> Any:
    """Return a field of the dataclass.

    Args:
        default: Its value if it is not given.
        least: The smallest value that is allowed (for a list: of every entry).
        choices: The only values that are allowed (for a list: the only entries).
    """
    return dataclasses.field(default=default, metadata={"text": text, "least": least, "choices": tuple(choices)})


def read_options(schema: type[Options], doc: str | None) -> Options:
    """Return the options of this process's command line; errors end it, and ``--help``, which shows ``doc``."""
    if any(word in ("-h", "--help", "help") for word in sys.argv[1:]):
        print(help_text(schema, doc))
        sys.exit(0)
    try:
        return parse(schema, sys.argv[1:])
    except ValueError as error:
        refuse(error)


def refuse(error: ValueError) -> NoReturn:
    """Print an error as one sentence, and end the process with exit code 1."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)


def parse(schema: type[Options], words: Sequence[str]) -> Options:
    """Return options from ``name=value`` words; the last word about a name counts.

    Raises:
        ValueError: A word names no option, or its value is of the wrong type or not allowed.
    """
    fields = {field.name: field for field in dataclasses.fields(cast(Any, schema))}
    values: dict[str, Any] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise ValueError(f"{word!r} has no value: give name=value, of {', '.join(fields)}")
        if name not in fields:
            raise ValueError(f"there is no {name}{did_you_mean(name, fields)}")
        values[name] = _read(fields[name], value)
    return schema(**values)


def help_text(schema: type[Any], doc: str | None) -> str:
    """Return the docstring, and an option per line with its default."""
    shown = {field.name: f"{field.name}={_shown(field.default)}" for field in dataclasses.fields(schema)}
    lines = [f"  {shown[field.name]:<36} {field.metadata['text']}" for field in dataclasses.fields(schema)]
    return "\n".join([(doc or "").strip(), "", "options:", *lines])


def did_you_mean(name: str, known: Iterable[object]) -> str:
    """Return the end of a sentence about an unknown name: the nearest known one, or all of them."""
    listed = [str(each) for each in known]
    near = difflib.get_close_matches(name, listed, n=1)
    return f": did you mean {near[0]}?" if near else f": choose among {', '.join(listed)}"


def _read(field: dataclasses.Field[Any], text: str) -> Any:
    kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
    if text == "null" and NoneType in kinds:
        return None
    (kind,) = (each for each in kinds if each is not NoneType)
    several = get_origin(kind) is tuple
    convert, one, many = _KINDS[get_args(kind)[0] if several else kind]
    parts = [part.strip() for part in text.strip("[]").split(",") if part.strip()] if several else [text]
    try:
        found = [convert(part) for part in parts]
    except (KeyError, ValueError):
        wanted = (many if several else one) + (" or null" if NoneType in kinds else "")
        raise ValueError(f"{field.name}={text}: give {wanted}") from None
    least, choices = field.metadata["least"], field.metadata["choices"]
    for each in found:
        if choices and each not in choices:
            raise ValueError(f"{field.name}={text}: there is no {each}{did_you_mean(str(each), choices)}")
        if least is not None and each < least:
            raise ValueError(f"{field.name}={text}: give at least {least}")
    return tuple(found) if several else found[0]


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
