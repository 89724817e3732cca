"""Tests, in the layout of the packages; and the type checker that runs under jaxtyping meanwhile (see the Makefile).

The checker is beartype, told what PEP 484 says of numbers: an ``int`` is fine where a ``float`` is asked for, so that
``SamplingParams(temperature=1)`` is no error. It stands here because jaxtyping finds it by the name of a top-level
package. It is imported on first use: the tests that need a GPU also run on machines without beartype.
"""

from collections.abc import Callable
from functools import cache
from typing import Any


def check_types(checked: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that checks the types of its arguments."""
    return _checker()(checked)


@cache
def _checker() -> Any:
    from beartype import BeartypeConf, beartype

    return beartype(conf=BeartypeConf(is_pep484_tower=True))
