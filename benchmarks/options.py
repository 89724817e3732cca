"""The command line of the benchmarks: ``name=value`` words, as the experiments take them, with a dataclass as schema.

It needs the standard library only, because benchmarks also run on machines without Hydra. A list is written
``[a,b]``; nothing at all, ``null``.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, cast, get_args, get_origin

from experiments.app.checking import did_you_mean

Options = TypeVar("Options")

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", Path: "a path", NoneType: "null"}


def option(default: Any, text: str, *, least: int | None = None, choices: Sequence[object] = ()) -> Any:
    """A field of the schema.

    Args:
        default: Its value if it is not given.
        text: What ``--help`` says about it.
        least: The smallest value that is allowed (for a list: of every entry).
        choices: The only values that are allowed (for a list: the only entries).
    """
    return dataclasses.field(default=default, metadata={"text": text, "least": least, "choices": tuple(choices)})


def read_options(schema: type[Options], doc: str | None) -> Options:
    """The options of this process's command line; ``--help`` and errors end the process.

    Args:
        schema: A dataclass whose fields are made by ``option``.
        doc: The benchmark's docstring, which ``--help`` shows above the options.
    """
    words = sys.argv[1:]
    if any(word in ("-h", "--help", "help") for word in words):
        print(help_text(schema, doc))
        sys.exit(0)
    try:
        return parse(schema, words)
    except ValueError as error:
        refuse(error)


def refuse(error: ValueError) -> NoReturn:
    """Print an error as one sentence, and end the process with exit code 1."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)


def parse(schema: type[Options], words: Sequence[str]) -> Options:
    """Options from ``name=value`` words; the last word about a name counts.

    Raises:
        ValueError: A word names no option, or its value is of the wrong type or not allowed.
    """
    fields = {field.name: field for field in dataclasses.fields(cast(Any, schema))}
    given: dict[str, Any] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise ValueError(f"{word!r} has no value: give name=value, of {', '.join(fields)}")
        if name not in fields:
            raise ValueError(f"there is no {name}{did_you_mean(name, fields)}")
        given[name] = _read(fields[name], value)
    return schema(**given)


def help_text(schema: type[Any], doc: str | None) -> str:
    """What ``--help`` prints: the docstring, and an option per line with its default."""
    lines = [(doc or "").strip(), "", "options:"]
    for field in dataclasses.fields(schema):
        lines.append(f"  {f'{field.name}={_shown(field.default)}':<36} {field.metadata['text']}")
    return "\n".join(lines)


def _read(field: dataclasses.Field[Any], value: str) -> Any:
    kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
    for kind in sorted(kinds, key=lambda kind: kind is not NoneType):  # null is no text where it may be nothing
        if get_origin(kind) is tuple:
            inner = get_args(kind)[0]
            parts = [part.strip() for part in value.strip("[]").split(",") if part.strip()]
            entries = [_simple(inner, part) for part in parts]
            if not any(entry is _WRONG for entry in entries):
                for entry in entries:
                    _check(field, entry, value)
                return tuple(entries)
            continue
        made = _simple(kind, value)
        if made is not _WRONG:
            _check(field, made, value)
            return made
    raise ValueError(f"{field.name}={value}: give {' or '.join(_wanted(kind) for kind in kinds)}")


_WRONG = object()


def _simple(kind: Any, value: str) -> Any:
    """A value of a simple type; ``_WRONG`` if the text is none."""
    if kind is NoneType:
        return None if value == "null" else _WRONG
    if kind is bool:
        return {"true": True, "false": False}.get(value.lower(), _WRONG)
    try:
        return kind(value)
    except ValueError:
        return _WRONG


def _check(field: dataclasses.Field[Any], made: Any, value: str) -> None:
    least, choices = field.metadata["least"], field.metadata["choices"]
    if made is None:
        return
    if choices and made not in choices:
        near = did_you_mean(str(made), [str(choice) for choice in choices])
        raise ValueError(f"{field.name}={value}: there is no {made}{near}")
    if least is not None and made < least:
        raise ValueError(f"{field.name}={value}: give at least {least}")


def _wanted(kind: Any) -> str:
    if get_origin(kind) is not tuple:
        return _WORDS[kind]
    one = {int: "integers", float: "numbers", str: "texts"}[get_args(kind)[0]]
    return f"a list of {one}, such as [a,b]" if one == "texts" else f"a list of {one}, such as [1,2]"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
