"""When the shapes of arrays are checked: in the first calls of a function in every test.

A check takes as long as a small operation on tensors, and to prepare the checks of a function takes as long as a round.
So only functions whose annotations name shapes are checked (pyright knows all other types), their checks are prepared
when they are first called, and two numbers limit the rest: the checked calls of a function in one test, and the copies
of a function that is defined inside another one, which is made anew at every call of the outer one.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import CodeType, FunctionType
from typing import Any, get_args

import jaxtyping

MOST_CALLS = 8
"""Calls of a function that are checked in one test: each of its shapes occurs among them, or in another test."""
MOST_COPIES = 20
"""Copies of an inner function that are checked, in one process."""

_tests = 0
_copies: Counter[CodeType] = Counter()
_jaxtyped: Any = jaxtyping.jaxtyped


def begin_checks() -> None:
    """Switch the checks on, for a new test."""
    global _tests
    _tests += 1
    jaxtyping.config.update("jaxtyping_disable", False)


def _has_shapes(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shapes, get_args(annotation)))


def _prepared_late(function: Callable[..., Any], decorate: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose checks are prepared at its first call, or itself if there is nothing to check."""
    if hasattr(function, "_checked") or not any(map(_has_shapes, getattr(function, "__annotations__", {}).values())):
        return function
    made: Callable[..., Any] | None = None
    test = left = 0

    @wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        nonlocal made, test, left
        if test != _tests:
            test, left = _tests, MOST_CALLS
        if not left or jaxtyping.config.jaxtyping_disable:
            return function(*arguments, **named)
        left -= 1
        if made is None:
            made = decorate(function)
        return made(*arguments, **named)

    checked._checked = True  # type: ignore[attr-defined]
    return checked


def _sparingly(**options: Any) -> Callable[[Any], Any]:
    """Returns jaxtyping's decorator, which prepares late, and leaves all but the first copies as they are."""
    decorate = _jaxtyped(**options)

    def decorated(function: Any) -> Any:
        if isinstance(function, type):
            if dataclasses.is_dataclass(function) and "__init__" in vars(function):
                function.__init__ = _prepared_late(function.__init__, decorate)  # type: ignore[misc]
            return function
        if not isinstance(function, FunctionType):  # a property, a class method
            return decorate(function)
        if "<locals>" in function.__qualname__:
            _copies[function.__code__] += 1
            if _copies[function.__code__] > MOST_COPIES:
                return function
        return _prepared_late(function, decorate)

    return decorated


jaxtyping.jaxtyped = _sparingly  # what the modules under test are decorated with


@contextmanager
def shapes_unchecked() -> Iterator[None]:
    """Leaves out the checks of shapes, which take most of the time of thousands of short requests."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
