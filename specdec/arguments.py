"""Checks of arguments where a user gives them: one sentence says what was given, and what to give."""

import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

WHOLE = "give a whole number, without a decimal point"
_LONGEST = 80
Test = Callable[[float], bool]


def number(name: str, value: object, remedy: str = "give a number", test: Test = lambda number: True) -> float:
    """Returns the value, which passes the test, as a Python number; numpy's are accepted, booleans and text are not."""
    # bool and numpy's integers register as numbers.Real, numpy's booleans do not.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={shown(value)}: {remedy}")
    try:
        converted = float(value)
    except OverflowError as error:
        raise ValueError(f"{name}={value}: give a number that a float can hold") from error
    if not test(converted):
        raise ValueError(f"{name}={value}: {remedy}")
    return value if type(value) is int else converted  # 1 stays 1 in messages and records


def whole(name: str, value: object, *, least: int | None = None, remedy: str = WHOLE, few: str = "") -> int:
    """Returns the value as an int of at least ``least``; numpy's are accepted, booleans, floats and text are not.

    The remedies are for a value that is no integer, and for one that is too small (by default "give at least …").
    """
    if isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={value!r}: {remedy}")
    try:
        converted = operator.index(value)  # pyright: ignore[reportArgumentType] (it is what tells)
    except TypeError as error:
        raise ValueError(f"{name}={shown(value)}: {remedy}") from error
    if least is not None and converted < least:
        raise ValueError(f"{name}={converted}: {few or f'give at least {least}'}")
    return converted


def wholes(name: str, values: object, remedy: str) -> tuple[int, ...]:
    """Returns the values as a tuple of ints; a number by itself and text are not accepted."""
    if isinstance(values, Iterable) and not isinstance(values, str):
        try:
            return tuple(whole(name, value) for value in values)
        except ValueError:
            pass  # the message shows all of them
    raise ValueError(f"{name}={shown(values)}: {remedy}")


def flag(name: str, value: object) -> bool:
    """Returns the value as a bool; numpy's booleans are accepted, numbers and text are not."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={shown(value)}: give True or False")
    return bool(value)


def text(name: str, value: object, remedy: str = "give a text") -> str:
    """Returns the value, which is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}={shown(value)}: {remedy}")
    return value


def instance(name: str, value: object, kind: type | tuple[type, ...], remedy: str) -> None:
    """Refuse a value of another class, or a class in place of an instance; ``remedy`` follows after "give"."""
    if isinstance(value, kind):
        return
    if isinstance(value, type):
        wanted = f"an instance, {value.__name__}(…)" if issubclass(value, kind) else remedy
        raise ValueError(f"{name} is the class {value.__name__} itself: give {wanted}")
    raise ValueError(f"{name} is {kind_of(value)}: give {remedy}")


def shown(value: object) -> str:
    """Returns a value as messages show it: on one line, and cut where it is long."""
    written = " ".join(repr(value).split())
    return written if len(written) <= _LONGEST else f"{written[: _LONGEST - 1]}…"


def kind_of(value: Any) -> str:
    """Returns in words what kind of object a value is: ``"a dict"``, ``"None"``, ``"an int"``."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
