"""Lines of progress where there is no terminal; how long a training still takes, from its newest steps."""

import io

import pytest

from experiments.reporting.progress import Every, Progress, TrainingProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched(io.StringIO):
    """A file that knows what has been flushed."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def test_a_line_every_so_many_prompts_is_there_at_once() -> None:
    clock, file = Clock(), Watched()
    with Progress(10, every=Every(prompts=4), file=file, clock=clock) as progress:
        for done in range(1, 11):
            clock.now += 2
            progress.update(done)
            if done == 4:
                assert file.flushed == "4 of 10 prompts, 8 s elapsed, about 12 s left\n"
    assert file.getvalue().splitlines()[1:] == ["8 of 10 prompts, 16 s elapsed, about 4 s left"]


def test_settings() -> None:
    given = {None: None, 10: Every(prompts=10), "30s": Every(seconds=30), "5m": Every(seconds=300)}
    assert {value: Every.of(value) for value in given} == given
    for value in (0, -1, True, "30", "s", "1.5m", ""):
        with pytest.raises(ValueError, match="progress_every="):
            Every.of(value)


def told(capsys: pytest.CaptureFixture[str], passed: int = 0) -> list[str]:
    """The time left of a training of 100 steps of 2 s, measured in 6 s after every 50."""
    clock = Clock()
    progress = TrainingProgress(100, title="", every=Every(prompts=10), shown=True, measured_every=50, clock=clock)
    with progress:
        clock.now += 1000  # loads
        progress.begin(passed)
        for done in range(passed + 1, 101):
            clock.now += 2
            progress.step(done, {})
            if done % 50 == 0:
                clock.now += 6
                progress.evaluated(done, {}, False)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    return [line.removeprefix("step ").removesuffix(" left").replace(" of 100, about ", ": ") for line in lines]


def test_the_time_left_of_a_training_is_that_of_its_own_steps_and_measurements(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = told(capsys)
    assert lines[3] == "40: 2:00 min", "no measurement has been seen"
    assert lines[5:] == ["60: 1:26 min", "70: 1:06 min", "80: 46 s", "90: 26 s", "100: 6 s"]
    resumed = told(capsys, passed=50)
    assert (resumed[0], resumed[-2]) == ("60: 1:20 min", "90: 20 s"), "an earlier attempt's steps do not count"
