"""Lines of progress where there is no terminal."""

import io

import pytest

from experiments.reporting.progress import Every, Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(every: Every | None, *, total: int = 10, seconds: float = 2.0, passed: int = 0) -> list[str]:
    """What is written while one prompt after the other is done, each in so many seconds."""
    clock, file = Clock(), io.StringIO()
    with Progress(total, passed=passed, every=every, file=file, clock=clock) as progress:
        for done in range(1, total + 1):
            clock.now += 0 if done <= passed else seconds
            progress.update(done)
    return file.getvalue().splitlines()


def test_a_line_every_so_many_prompts() -> None:
    assert lines(Every(prompts=4)) == [
        "4 of 10 prompts, 8 s elapsed, about 12 s left",
        "8 of 10 prompts, 16 s elapsed, about 4 s left",
    ]


def test_a_line_is_there_at_once() -> None:
    class Watched(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    file = Watched()
    with Progress(2, every=Every(prompts=1), file=file) as progress:
        progress.update(1)
        assert file.flushed.startswith("1 of 2 prompts")


def test_a_terminal_has_a_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with Progress(2, every=Every(prompts=1), file=file) as progress:
        progress.update(1)
    assert "1/2" in file.getvalue()
    assert "elapsed, about" not in file.getvalue()


@pytest.mark.parametrize(
    ("value", "every"),
    [(None, None), (10, Every(prompts=10)), ("30s", Every(seconds=30)), ("5m", Every(seconds=300))],
)
def test_settings(value: int | str | None, every: Every | None) -> None:
    assert Every.of(value) == every


@pytest.mark.parametrize("value", [0, -1, True, "30", "s", "1.5m", ""])
def test_bad_settings(value: int | str) -> None:
    with pytest.raises(ValueError, match="progress_every="):
        Every.of(value)
