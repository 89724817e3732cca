"""When the shapes of arrays are checked: at the beginning of every test, and not where other tests check the same code.

A check takes as long as a small operation on tensors. Checked all the way, tests of thousands of rounds would spend
most of their time on calls of the same functions with the same shapes. So two numbers limit the checks: of a test, and
of the copies of a function that is defined inside another one, since a copy is made at every call of the outer one and
preparing its checks takes as long as a round.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import CodeType
from typing import Any

import jaxtyping

MOST_CHECKS = 5_000
"""Checks in one test, two for each call of a function that returns something: about a tenth of a second."""
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


def _sparingly(**options: Any) -> Callable[[Any], Any]:
    """Returns jaxtyping's decorator, which then leaves all but the first copies of an inner function as they are."""
    decorate = _jaxtyped(**options)

    def decorated(function: Any) -> Any:
        if "<locals>" in getattr(function, "__qualname__", "") and hasattr(function, "__code__"):
            _copies[function.__code__] += 1
            if _copies[function.__code__] > MOST_COPIES:
                return function
        return decorate(function)

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
