"""Random programs of the engine: whatever is asked of it in whatever order, an output is that of its request alone.

Drafters, rules, trees, models, schedulers, faults and interrupts are drawn together, and drafts that make NaN. A search
of its own takes another number of programs from the environment:
``SPECDEC_PROGRAMS=10000 make test-full ARGS="-k outputs_are_those"``.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from specdec.engine.read_back import ReadBack
from specdec.engine.running import RunningRequests
from tests.random_programs import POISONED, Program, play, programs
from tests.specdec.test_schedules import NET, count_anew

pytestmark = pytest.mark.usefixtures("untried")


@given(programs())
@settings(NET, max_examples=int(os.environ.get("SPECDEC_PROGRAMS", 150)))
def test_outputs_are_those_of_requests_alone(program: Program) -> None:
    assert play(program) == []


def lose_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = RunningRequests.fail
    monkeypatch.setattr(RunningRequests, "fail", lambda *given: fail(*given)[1:])


def take_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = ReadBack.unpack

    def valid(*given: Any) -> ReadBack:
        read = unpack(*given)
        read.valid[:] = True
        return read

    monkeypatch.setattr(ReadBack, "unpack", valid)


MANY_STEPS = (*(("submit", number) for number in range(4, 9)), *(("step", 0),) * 9)
REJECTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Program]] = {
    "numbers drawn again": (
        count_anew, Program("llama", "ngram", True, 0, "random", "rows", 3, 3, 5, "off", False, (), MANY_STEPS),
    ),
    "last steps that an interrupt loses": (
        lose_last_steps,
        Program("lfm2", "ngram", False, 0, "deadline", "rows", 3, 3, 5, "off", False, (("forward", 3, 2),), MANY_STEPS),
    ),
    "rounds that are not finite": (
        take_what_is_not_finite,
        Program("llama", POISONED, False, 0, "first come", "rows", 3, 3, 5, "rounds", False, (), MANY_STEPS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REJECTED)
def test_mutants_of_every_kind_are_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, program = REJECTED[kind]
    assert play(program) == []
    change(monkeypatch)
    assert play(program) != []
