"""How long a training still takes, from its newest steps and measurements."""

import time
from collections import deque
from collections.abc import Callable
from statistics import median, median_low

_STEPS, _MEASUREMENTS = 50, 5


class TimeLeft:
    """Estimates the time that is left from the median of the newest steps: a pause is one slow step among them.

    What an earlier attempt did, and how fast, is no part of it.

    Args:
        total: Steps in all.
        measured_every: Steps between two measurements.
        clock: The time in seconds.
    """

    def __init__(self, total: int, measured_every: int, clock: Callable[[], float] = time.monotonic):
        self._total, self._measured_every, self._clock = total, measured_every, clock
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._measurements: deque[float] = deque(maxlen=_MEASUREMENTS)
        self._last = clock()

    def begin(self) -> None:
        """The first step begins."""
        self._last = self._clock()

    def step(self) -> None:
        """A step has ended."""
        self._steps.append(self._passed())

    def measured(self) -> None:
        """A measurement has ended, which began after a step."""
        self._measurements.append(self._passed())

    def seconds(self, done: int) -> float:
        """Returns the estimate at the end of so many steps, of which at least one was seen."""
        # One follows every so many steps, this one perhaps, and one the last step.
        measurements = -(-self._total // self._measured_every) - (done - 1) // self._measured_every
        # They are few, and each does the same: of two, the quicker one was not paused.
        each = median_low(self._measurements) if self._measurements else 0.0
        return (self._total - done) * median(self._steps) + measurements * each

    def _passed(self) -> float:
        """Returns the seconds since this was last asked."""
        before, self._last = self._last, self._clock()
        return self._last - before
