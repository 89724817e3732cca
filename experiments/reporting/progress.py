"""How far a run is: a bar on a terminal; elsewhere (a batch system's log, nohup) a line from time to time."""

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.reporting.durations import duration

_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Every:
    """How often a line is written: after so many prompts, or after so many seconds."""

    prompts: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, value: int | str | None) -> Self | None:
        """From a setting: 10 (prompts), ``"30s"``, ``"5m"``, ``"1h"``; None for no lines.

        Raises:
            ValueError: It is none of these.
        """
        if value is None:
            return None
        if type(value) is int and value >= 1:
            return cls(prompts=value)
        found = re.fullmatch(r"([1-9]\d*)([smh])", value) if isinstance(value, str) else None
        if found is None:
            raise ValueError(f"progress_every={value!r}: give a number of prompts, a time such as 30s or 5m, or null")
        return cls(seconds=int(found[1]) * _UNITS[found[2]])


class PromptProgress:
    """Shows how many prompts are done, in a ``with`` block. Nothing of it is left on a terminal.

    Args:
        total: Prompts in all.
        passed: Those that an earlier attempt has done, which take no time now.
        every: How often a line is written where there is no terminal.
        file: Where it is shown.
        clock: The time in seconds.
    """

    def __init__(
        self,
        total: int,
        *,
        passed: int = 0,
        every: Every | None = None,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._passed, self._every, self._clock = total, passed, every, clock
        self._file = file if file is not None else sys.stderr
        screen = Console(file=self._file)
        self._bar: Progress | None = None
        if screen.is_terminal:
            columns = (
                *(TextColumn("prompts"), BarColumn(), MofNCompleteColumn()),
                *(TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()),
            )
            self._bar = Progress(*columns, console=screen, transient=True)
            self._task = self._bar.add_task("prompts", total=total)
        self._began = self._said_at = clock()
        self._said = 0

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int) -> None:
        """So many prompts are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif self._is_due(done):
            self._said, self._said_at = done, self._clock()
            print(self._line(done), file=self._file, flush=True)

    def _is_due(self, done: int) -> bool:
        if self._every is None or done <= self._passed:
            return False
        if self._every.prompts is not None:
            return done - self._said >= self._every.prompts
        return self._clock() - self._said_at >= (self._every.seconds or 0)

    def _line(self, done: int) -> str:
        elapsed = self._clock() - self._began
        left = elapsed / (done - self._passed) * (self._total - done)
        return f"{done} of {self._total} prompts, {duration(elapsed)} elapsed, about {duration(left)} left"
