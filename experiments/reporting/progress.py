"""How far a run, a check or a training is: a bar on a terminal; elsewhere (in a log) a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

_EVERY = 30.0
"""Seconds between two lines where there is no terminal."""


def duration(seconds: float) -> str:
    """A time in words: ``45 s``, ``3:07 min``, ``2:05 h``."""
    whole = round(seconds)
    unit, words = (60, "min") if whole < 3600 else (3600, "h")
    return f"{whole} s" if whole < 60 else f"{whole // unit}:{whole % unit * 60 // unit:02d} {words}"


_began = time.monotonic()


def phase(text: str, *, shown: bool) -> None:
    """Say what begins, and when since the program did, where errors go into a file or a pipe."""
    if shown and not sys.stderr.isatty():
        print(f"{duration(time.monotonic() - _began)}: {text}", file=sys.stderr, flush=True)


@contextmanager
def steps_shown(first: str) -> Iterator[Callable[[str], None]]:
    """Show which step a command is at, from the first: in one line of a terminal, elsewhere in a line for each step.

    Of steps that begin alike (``pass 1``, ``pass 2``) one in five seconds has a line.
    """
    screen, begin, said = Console(stderr=True), time.monotonic(), dict[str, float]()
    if screen.is_terminal:
        with screen.status(first) as status:
            yield status.update
        return

    def say(step: str) -> None:
        kind, now = step.partition(":")[0], time.monotonic()
        if now - said.get(kind, 0.0) < 5:
            return
        said[kind] = now
        screen.print(f"{time.monotonic() - begin:.0f} s: {step}", highlight=False, markup=False)

    say(first)
    yield say


class Progress:
    """Shows how much is done, in a ``with`` block: a transient bar on a terminal; else lines in time."""

    def __init__(self, total: int, unit: str = "prompts", *, passed: int = 0, shown: bool = True):
        self._total, self._unit, self._shown = total, unit, shown
        words = TextColumn("{task.fields[words]}")
        columns = [TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), words]
        self._bar = rich.progress.Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
        self._task = self._bar.add_task(unit, total=total, words="")
        self.begin(passed)

    def begin(self, passed: int) -> None:
        """Count time from now on; an earlier attempt has done so much."""
        self._passed = passed
        self._said = self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self._bar.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar.console.is_terminal:
            self._bar.stop()

    def update(self, done: int, words: str = "") -> None:
        """So much is done; ``words`` stand behind it. The time left is as if all went on as fast as since the begin."""
        now = time.monotonic()
        if done <= self._passed:  # what was warmed up before says nothing of the rest
            self._began = now
            self._bar.update(self._task, completed=done)
            return
        rest = (now - self._began) / (done - self._passed) * (self._total - done)
        left = f"about {duration(rest)} left{f', {words}' if words else ''}"
        self._bar.update(self._task, completed=done, words=left)
        if not self._bar.console.is_terminal and now - self._said >= _EVERY:
            self._said = now
            self.line(f"{done} of {self._total} {self._unit}, {duration(now - self._began)} elapsed, {left}")

    def line(self, text: str) -> None:
        """Write a line, above the bar if there is one."""
        if self._shown:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)


class TrainingProgress(Progress):
    """Shows how far a training is, in a ``with`` block, and a line per measurement; ``last`` has the newest figures."""

    def __init__(self, total: int, *, title: str, shown: bool, curve: Callable[[int, Mapping[str, float]], None]):
        super().__init__(total, "steps", shown=shown)
        self.last: dict[str, float] = {}
        self._curve = curve
        self.line(title)

    def step(self, done: int, figures: Mapping[str, float]) -> None:
        """So many steps are done."""
        self.last |= figures
        self._curve(done, figures)
        self.update(done, f"loss {self.last['loss']:.3f}" if "loss" in self.last else "")

    def evaluated(self, done: int, figures: Mapping[str, float], best: bool) -> None:
        """The head was measured."""
        self.last |= figures
        self._curve(done, figures)
        names = ("simulated_length", "simulated_length_greedy", "served_length", "expected_length", "calibration_error")
        shown = {name.removeprefix("held_out/"): value for name, value in figures.items()}
        parts = []
        for name in (name for name in shown if name.startswith(names) and not name.endswith(("/low", "/high"))):
            low, high = shown.get(f"{name}/low"), shown.get(f"{name}/high")
            text = f"{name.replace('_', ' ')} {shown[name]:.3f}"
            if low is not None and high is not None:
                text += f" [{low:.2f}, {high:.2f}]"
            parts.append(text)
        by = "expected" if "expected_length" in shown else "served"
        self.line(f"after step {done}: {', '.join(parts)}{f' (best so far by {by} length)' if best else ''}")
