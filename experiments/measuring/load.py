"""The load of the machine while something was timed: of this process, and of all others."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""States of a core that is not idle. Time that a virtual machine's host kept for itself (steal) counts, too."""


@dataclass(frozen=True)
class Reading:
    """Clocks at one moment, all in seconds.

    Attributes:
        wall: Wall time.
        busy: Time that the cores were busy, added up over those that this process may use.
        own: CPU time of this process, over all of its threads.
        cores: How many cores these are.
    """

    wall: float
    busy: float
    own: float
    cores: int


class LoadMeter:
    """Measures the load between two moments.

    Args:
        read: Gives the clocks; None where the system does not tell.
    """

    def __init__(self, read: Callable[[], Reading | None] | None = None):
        self._read = read or read_clocks
        self._start = self._read()

    def stop(self) -> dict[str, float]:
        """The load since the meter was made, in cores.

        Returns:
            ``own``: what this process used; ``others``: what all others used; ``cores``: how many there are. The system
            counts in steps of about 10 ms, so ``others`` of a short time may be below 0: means over a run are right.
            Empty where the system does not tell.
        """
        start, end = self._start, self._read()
        if start is None or end is None or end.wall <= start.wall:
            return {}
        seconds = end.wall - start.wall
        own = (end.own - start.own) / seconds
        busy = (end.busy - start.busy) / seconds
        return {"cores": end.cores, "own": round(own, 4), "others": round(busy - own, 4)}


def read_clocks() -> Reading | None:
    """The clocks of this system; None where it does not tell."""
    try:
        every = psutil.cpu_times(percpu=True)
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
        listed = [every[number] for number in usable if number < len(every)]
        own = psutil.Process().cpu_times()
    except (OSError, psutil.Error, NotImplementedError, RuntimeError):
        return None
    busy = sum(getattr(times, name, 0.0) for times in listed for name in _BUSY)  # not every system has all of them
    return Reading(wall=time.monotonic(), busy=busy, own=own.user + own.system, cores=len(listed))
