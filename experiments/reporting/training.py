"""How a training goes: a bar with the time left, or lines; and what it came to."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.reporting.durations import duration
from experiments.reporting.progress import Every
from experiments.reporting.terminal import short
from experiments.reporting.time_left import TimeLeft


class TrainingProgress:
    """Shows how far a training is, in a ``with`` block, and a line for every measurement.

    Args:
        total: Steps in all.
        title: What is trained, in one line.
        every: How often a line is written where there is no terminal; its number means steps.
        shown: False in all processes but the main one.
        measured_every: Steps between two measurements.
        clock: The time in seconds.

    Attributes:
        last: The newest figures, by name.
    """

    def __init__(
        self,
        total: int,
        *,
        title: str,
        every: Every | None,
        shown: bool,
        measured_every: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.last: dict[str, float] = {}
        self.best: tuple[int, Mapping[str, float]] | None = None
        self._total, self._every, self._shown, self._title = total, every, shown, title
        self._clock = clock
        self._screen = Console(file=sys.stderr)
        self._bar: Progress | None = None
        if shown and self._screen.is_terminal:
            self._bar = Progress(
                *(TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
                *(TextColumn("{task.fields[left]}"), TextColumn("{task.fields[told]}")),
                console=self._screen,
                transient=True,
            )
        self._said, self._said_at = 0, clock()
        self._left = TimeLeft(total, measured_every, clock)

    def __enter__(self) -> Self:
        if self._shown:
            print(self._title, file=sys.stderr, flush=True)
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, passed: int) -> None:
        """The training begins, after steps that an earlier attempt has done."""
        self._said, self._said_at = passed, self._clock()
        self._left.begin()
        if self._bar is not None:
            self._task = self._bar.add_task("steps", total=self._total, completed=passed, left="", told="")
        if passed:
            self._line(f"goes on after step {passed}")

    def step(self, done: int, figures: Mapping[str, float]) -> None:
        """So many steps are done."""
        self.last |= figures
        self._left.step()
        left = f"about {duration(self._left.seconds(done))} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, left=left, told=self._told())
        elif self._is_due(done):
            self._said, self._said_at = done, self._clock()
            self._line(f"step {done} of {self._total}, {left}{self._told(', ')}")

    def evaluated(self, done: int, figures: Mapping[str, float], best: bool) -> None:
        """The head was measured."""
        self.last |= figures
        self._left.measured()
        if best:
            self.best = (done, dict(figures))
        told = []
        if "held_out/simulated_length" in figures:
            told.append(
                f"simulated length {figures['held_out/simulated_length']:.2f}"
                f" (greedy {figures['held_out/simulated_length_greedy']:.2f})"
            )
        lengths = [
            f"{value:.2f} at {name.partition('/')[2]}" for name, value in figures.items() if "served_length/" in name
        ]
        if lengths:
            told.append(f"served length {', '.join(lengths)}")
        if "held_out/calibration_error" in figures:
            told.append(f"calibration error {figures['held_out/calibration_error']:.3f}")
        self._line(f"after step {done}: {'; '.join(told)}{' (best so far)' if best else ''}")

    def _told(self, before: str = "") -> str:
        loss = self.last.get("loss")
        rate = self.last.get("training/acceptance/1")
        return "" if loss is None else f"{before}loss {loss:.3f}" + ("" if rate is None else f", acceptance {rate:.2f}")

    def _is_due(self, done: int) -> bool:
        if not self._shown or self._every is None:
            return False
        if self._every.prompts is not None:
            return done - self._said >= self._every.prompts
        return self._clock() - self._said_at >= (self._every.seconds or 0)

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._shown:
            print(text, file=sys.stderr, flush=True)


def say_result(progress: TrainingProgress, folder: Path, written: Sequence[Path]) -> None:
    """Say what the training came to, and where it is."""
    if progress.best is not None:
        step, figures = progress.best
        print(f"best: step {step}, served length {figures['served_length']:.3f}")
    there = [f"{path.name}/" for path in written if path.exists()]
    print(f"wrote into {short(folder)}: {', '.join(there)} and training.jsonl")
