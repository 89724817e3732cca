"""The checks of shapes in tests: they are made, and end where they would only take time."""

from collections.abc import Callable
from dataclasses import dataclass

import jaxtyping
import torch
from jaxtyping import Float
from torch import Tensor

from tests import check_types
from tests.shapes import MOST_CALLS, begin_checks, shapes_unchecked

RIGHT, WRONG = (torch.zeros(2), torch.zeros(2)), (torch.zeros(2), torch.zeros(3))
checked = jaxtyping.jaxtyped(typechecker=check_types)


def noticed(function: Callable[..., object]) -> bool:
    try:
        function(*WRONG)
    except jaxtyping.TypeCheckError:
        return True
    return False


def test_a_wrong_shape_is_noticed() -> None:
    @checked
    def added(a: Float[Tensor, " node"], b: Float[Tensor, " node"]) -> Float[Tensor, " node"]:
        return a + b[: len(a)]

    assert noticed(added) and torch.equal(added(*RIGHT), torch.zeros(2))
    with shapes_unchecked():
        assert not noticed(added)
    assert [noticed(added) for _ in range(MOST_CALLS)] == [True] * (MOST_CALLS - 2) + [False] * 2
    begin_checks()
    assert noticed(added), "in the next test again"


def test_fields_and_what_stands_inside_of_other_types_are_checked() -> None:
    @checked
    @dataclass(frozen=True)
    class Pair:
        a: Float[Tensor, " node"]
        b: tuple[Float[Tensor, " node"] | None, ...]

    assert noticed(lambda a, b: Pair(a, (None, b))) and Pair(RIGHT[0], RIGHT).b == RIGHT
