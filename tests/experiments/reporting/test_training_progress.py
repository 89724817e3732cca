"""How long a training still takes: from its newest steps, whatever happened before."""

import pytest

from experiments.reporting.progress import Every, TimeLeft, TrainingProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def told(capsys: pytest.CaptureFixture[str], *, pause: float = 0.0, passed: int = 0, paused_at: int = 30) -> list[str]:
    """The lines of a training of 100 steps of 2 s, measured in 6 s after every 50."""
    clock = Clock()
    progress = TrainingProgress(100, title="", every=Every(prompts=10), shown=True, measured_every=50, clock=clock)
    with progress:
        clock.now += 1000  # loads
        progress.begin(passed)
        for done in range(passed + 1, 101):
            clock.now += 2 + (pause if done == paused_at else 0)
            progress.step(done, {})
            if done % 50 == 0:
                clock.now += 6
                progress.evaluated(done, {}, False)
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("step")]


def test_the_time_left_is_that_of_the_steps_and_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys)
    assert lines[3] == "step 40 of 100, about 2:00 min left", "no measurement has been seen"
    assert lines[5:] == [
        "step 60 of 100, about 1:26 min left",
        "step 70 of 100, about 1:06 min left",
        "step 80 of 100, about 46 s left",
        "step 90 of 100, about 26 s left",
        "step 100 of 100, about 6 s left",
    ]


def test_a_pause_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    """A laptop that slept, or a process that was stopped for nine hours, says the same afterwards."""
    assert told(capsys, pause=9 * 3600) == told(capsys)


def test_what_an_earlier_attempt_did_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, passed=50)
    assert lines[0] == "step 60 of 100, about 1:20 min left"
    assert lines[-2] == "step 90 of 100, about 20 s left"


def test_a_pause_at_the_first_step_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, pause=3600, passed=50, paused_at=51) == told(capsys, passed=50)


def test_the_pace_is_that_of_the_newest_steps() -> None:
    """Half way, something else begins to use the machine."""
    clock = Clock()
    left = TimeLeft(300, 1000, clock)
    for done in range(1, 201):
        clock.now += 1 if done <= 100 else 3
        left.step()
        if done in (100, 200):
            assert left.seconds(done) == {100: 200 * 1, 200: 100 * 3}[done]


def test_a_pause_within_a_measurement_is_forgotten_with_the_next_one() -> None:
    clock = Clock()
    left = TimeLeft(40, 10, clock)
    for done in range(1, 22):
        clock.now += 1
        left.step()
        if done % 10 == 0:
            clock.now += 5 if done == 20 else 9000
            left.measured()
    assert left.seconds(21) == 19 * 1 + 2 * 5
