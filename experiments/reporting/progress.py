"""How far a run, a check or a training is: a bar on a terminal; elsewhere (in a log) a line now and then."""

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TextIO

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from experiments.reporting import terminal

Clock = Callable[[], float]
_UNITS = {"s": 1, "m": 60, "h": 3600}


def duration(seconds: float) -> str:
    """A time in words: ``45 s``, ``3:07 min``, ``2:05 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    unit, words = (60, "min") if whole < 3600 else (3600, "h")
    return f"{whole // unit}:{whole % unit * 60 // unit:02d} {words}"


@contextmanager
def steps_shown(first: str) -> Iterator[Callable[[str], None]]:
    """Show which step a command is at, from the first: in one line of a terminal, elsewhere in a line for each step."""
    screen, begin = Console(stderr=True), time.monotonic()
    if screen.is_terminal:
        with screen.status(first) as status:
            yield status.update
        return

    def say(step: str) -> None:
        terminal.say(screen, f"{time.monotonic() - begin:.0f} s: {step}")

    say(first)
    yield say


@dataclass(frozen=True)
class Every:
    """How often a line is written: after so many prompts (of a training: steps), or after so many seconds."""

    prompts: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, value: int | str | None) -> Self | None:
        """From a setting: 10 (prompts), ``"30s"``, ``"5m"``, ``"1h"``; None for no lines."""
        if value is None:
            return None
        if type(value) is int and value >= 1:
            return cls(prompts=value)
        found = re.fullmatch(r"([1-9]\d*)([smh])", value) if isinstance(value, str) else None
        if found is None:
            raise ValueError(f"progress_every={value!r}: give a number of prompts, a time such as 30s or 5m, or null")
        return cls(seconds=int(found[1]) * _UNITS[found[2]])


class Progress:
    """Shows how much is done, in a ``with`` block. Nothing of a bar is left on a terminal."""

    def __init__(
        self,
        total: int,
        unit: str = "prompts",
        *,
        passed: int = 0,
        every: Every | None = None,
        file: TextIO | None = None,
        clock: Clock = time.monotonic,
        shown: bool = True,
    ):
        self._total, self._unit, self._every, self._clock, self._shown = total, unit, every, clock, shown
        self._file = file if file is not None else sys.stderr
        screen = Console(file=self._file)
        words = TextColumn("{task.fields[words]}")
        columns = [TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), words]
        bar = rich.progress.Progress(*columns, console=screen, transient=True)
        self._bar = bar if shown and screen.is_terminal else None
        self._task = bar.add_task(unit, total=total, words="")
        self.begin(passed)

    def begin(self, passed: int) -> None:
        """Count time from now on; an earlier attempt has done so much."""
        self._passed, self._said = passed, 0
        self._said_at = self._began = self._clock()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, words: str = "") -> None:
        """So much is done; ``words`` stand behind it. The time left is as if all went on as fast as since the begin."""
        elapsed = self._clock() - self._began
        rest = elapsed / max(1, done - self._passed) * (self._total - done)
        left = f"about {duration(rest)} left{f', {words}' if words else ''}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, words=left)
        elif done > self._passed and self._line_is_due(done):
            self.line(f"{done} of {self._total} {self._unit}, {duration(elapsed)} elapsed, {left}")

    def _line_is_due(self, done: int) -> bool:
        """Whether to write a line now; if so, the next one is due later."""
        if self._every is None:
            return False
        if self._every.prompts is not None:
            due = done - self._said >= self._every.prompts
        else:
            due = self._clock() - self._said_at >= (self._every.seconds or 0)
        if due:
            self._said, self._said_at = done, self._clock()
        return due

    def line(self, text: str) -> None:
        """Write a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._shown:
            print(text, file=self._file, flush=True)


class TrainingProgress(Progress):
    """Shows how far a training is, in a ``with`` block, and a line for every measurement.

    Attributes:
        last: The newest value of every figure.
        best: The best step so far with its figures; None before any measurement.
    """

    def __init__(self, total: int, *, title: str, every: Every | None, shown: bool):
        super().__init__(total, "steps", every=every, shown=shown)
        self.last: dict[str, float] = {}
        self.best: tuple[int, Mapping[str, float]] | None = None
        self.line(title)

    def step(self, done: int, figures: Mapping[str, float]) -> None:
        """So many steps are done."""
        self.last |= figures
        names = {"loss": "loss", "training/acceptance/1": "acceptance"}
        self.update(
            done, ", ".join(f"{word} {self.last[name]:.3f}" for name, word in names.items() if name in self.last)
        )

    def evaluated(self, done: int, figures: Mapping[str, float], best: bool) -> None:
        """The head was measured."""
        self.last |= figures
        if best:
            self.best = (done, dict(figures))
        names = ("simulated_length", "simulated_length_greedy", "served_length", "calibration_error")
        shown = {name.removeprefix("held_out/"): value for name, value in figures.items()}
        parts = [f"{name.replace('_', ' ')} {value:.3f}" for name, value in shown.items() if name.startswith(names)]
        self.line(f"after step {done}: {', '.join(parts)}{' (best so far)' if best else ''}")


def say_result(progress: TrainingProgress, folder: Path, written: Sequence[Path]) -> None:
    """Print the best step of a training, and where its files are."""
    if progress.best is not None:
        step, figures = progress.best
        print(f"best: step {step}, served length {figures['served_length']:.3f}")
    there = [f"{path.name}/" for path in written if path.exists()]
    print(f"wrote into {terminal.short(folder)}: {', '.join(there)} and training.jsonl")
