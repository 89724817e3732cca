"""All checks of a drafter as one line of a test."""

from collections.abc import Callable
from typing import Any

from specdec.drafter_checks.check import check_drafter
from specdec.interfaces import Drafter
from specdec.target.target import Target


def assert_conforms(make: Callable[[], Drafter], target: Target, **options: Any) -> None:
    """Tries a drafter against the whole contract.

    Args:
        make: Makes a new drafter, every time it is called.
        target: The target, in float32.
        **options: More arguments of ``check_drafter``.

    Raises:
        AssertionError: A check failed. Names all that did, with what is wrong.
        ValueError: See ``check_drafter``.
    """
    wrong = [finding for finding in check_drafter(make, target, **options) if finding.failed]
    if wrong:
        raise AssertionError("the drafter breaks its contract:\n" + "\n".join(map(str, wrong)))
