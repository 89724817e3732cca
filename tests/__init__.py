"""Tests, in the layout of the packages; and the type checker that runs under jaxtyping meanwhile (see the Makefile).

The checker is beartype, told what PEP 484 says of numbers: an ``int`` is fine where a ``float`` is asked for, so that
``SamplingParams(temperature=1)`` is no error. It stands here because jaxtyping finds it by the name of a top-level
package. It is imported on first use: the tests that need a GPU also run on machines without beartype.

A check costs as much as a small operation on tensors, and in a test of thousands of rounds they would take most of the
time while the same functions are called with the same shapes. So the first ``MOST_CHECKS`` checks of every test are
made and the rest of it runs without.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

MOST_CHECKS = 5_000
"""Checks in one test, two for each call of a function that returns something: about a tenth of a second."""

_made = 0


def check_types(checked: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that checks the types of its arguments, and ends the checks when a test has seen enough."""
    checking = _checker()(checked)

    @wraps(checking)
    def counted(*arguments: Any, **named: Any) -> Any:
        global _made
        _made += 1
        if _made > MOST_CHECKS:
            switch_checks(off=True)
        return checking(*arguments, **named)

    return counted


def begin_checks() -> None:
    """Switch the checks on, for a new test."""
    global _made
    _made = 0
    switch_checks(off=False)


def switch_checks(*, off: bool) -> None:
    """Switch jaxtyping's checks off or on."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", off)


@cache
def _checker() -> Any:
    from beartype import BeartypeConf, beartype

    return beartype(conf=BeartypeConf(is_pep484_tower=True))
