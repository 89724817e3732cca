"""Code that runs without the check of array shapes, because the same code runs with it in other tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import jaxtyping


@contextmanager
def shapes_unchecked() -> Iterator[None]:
    """Leaves out the checks of shapes, which take most of the time of thousands of short requests."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
