"""Notes of a calibration about its own measurement."""

import pytest

from experiments.measuring.calibrating import _note
from experiments.measuring.forwards import Forward, _timed

POINT = Forward(batch=1, queries=1, context=16)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ([1.0] * 8, None),
        ([1.0, 1.02] * 4, None),
        ([1.0] * 4 + [1.2] * 4, "20% more time in the later half"),
        ([1.2] * 4 + [0.9] * 4, "25% less time in the later half"),
        ([1.0] * 3, "timed 3 times only"),
    ],
)
def test_a_machine_that_changes_meanwhile_is_noted(seconds: list[float], said: str | None) -> None:
    note = _note([_timed(POINT, seconds) for _ in range(3)])
    assert said in note if said is not None else note == ""
