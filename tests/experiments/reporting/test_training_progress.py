"""How long a training still takes: from its newest steps, whatever happened before."""

import pytest

from experiments.reporting.progress import Every, TrainingProgress


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


def test_what_an_earlier_attempt_did_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, passed=50)
    assert lines[0] == "step 60 of 100, about 1:20 min left"
    assert lines[-2] == "step 90 of 100, about 20 s left"
