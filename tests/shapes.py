"""When the shapes of arrays are checked: at the beginning of every test, and not where other tests check the same code.

A check takes as long as a small operation on tensors, and to prepare the checks of a function takes as long as a round.
So only functions whose annotations name shapes are checked (pyright knows all other types), their checks are prepared
when they are first called, and two numbers limit the rest: the checks of a test, and the copies of a function that is
defined inside another one, which is made anew at every call of the outer one.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import CodeType, FunctionType
from typing import Any, get_args

import jaxtyping

MOST_CHECKS = 2_000
"""Checks in one test, two for each call of a function that returns something: some hundredths of a second."""
MOST_COPIES = 20
"""Copies of an inner function that are checked, in one process."""

_made = 0
_copies: Counter[CodeType] = Counter()
_jaxtyped: Any = jaxtyping.jaxtyped


def counted(check: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a check that switches all checks off when the test has made enough of them."""

    @wraps(check)
    def checking(*arguments: Any, **named: Any) -> Any:
        global _made
        _made += 1
        if _made > MOST_CHECKS:
            jaxtyping.config.update("jaxtyping_disable", True)
        return check(*arguments, **named)

    return checking


def begin_checks() -> None:
    """Switch the checks on, for a new test."""
    global _made
    _made = 0
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

    @wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        nonlocal made
        if jaxtyping.config.jaxtyping_disable:
            return function(*arguments, **named)
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
