"""When requests arrive: processes with a rate, and users who wait for an answer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from jaxtyping import Float

from experiments.load.run import CLOSED, OPEN

Times = Float[np.ndarray, " request"]


class Arrivals(ABC):
    """When requests arrive. Made from a seed, so the same for every method."""

    loop = OPEN
    rate: float
    """Requests per second, on average."""
    above_zero: ClassVar[tuple[str, ...]] = ("rate",)

    def __post_init__(self) -> None:
        for name in self.above_zero:
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"arrival.{name}={value:g}: give a number above 0")

    @abstractmethod
    def times(self, rng: np.random.Generator, count: int) -> Times:
        """Return when the first ``count`` requests arrive, in seconds, ascending."""

    def at_rate(self, rate: float) -> Self:
        """Return the same process with another rate."""
        return replace(self, rate=rate)  # pyright: ignore[reportArgumentType] - all processes are dataclasses


@dataclass(frozen=True, kw_only=True)
class Gaps(Arrivals):
    """Independent gaps between requests, with a gamma distribution.

    Attributes:
        cv: Coefficient of variation of the gaps: 0 is a request every 1 / ``rate`` seconds, 1 a Poisson process, more
            comes in bursts. vLLM's burstiness is 1 / cv².
    """

    rate: float = 1.0
    cv: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (np.isfinite(self.cv) and self.cv >= 0):
            raise ValueError(f"arrival.cv={self.cv:g}: give a number from 0 on")

    def times(self, rng: np.random.Generator, count: int) -> Times:
        if not self.cv:
            return np.arange(count) / self.rate
        shape = 1 / self.cv**2
        if self.cv == 1:
            return rng.exponential(1 / self.rate, count).cumsum()
        return rng.gamma(shape, 1 / (shape * self.rate), count).cumsum()


@dataclass(frozen=True, kw_only=True)
class Spike(Arrivals):
    """A Poisson process whose rate is ``factor`` times as high from ``begin`` on, for ``length`` seconds."""

    above_zero = ("rate", "factor", "length")
    rate: float = 1.0
    factor: float = 5.0
    begin: float = 10.0
    length: float = 5.0

    def times(self, rng: np.random.Generator, count: int) -> Times:
        begin, end, factor = self.begin, self.begin + self.length, self.factor
        return _thinned(
            rng, count, self.rate, lambda at: np.where((at >= begin) & (at < end), factor, 1.0), max(factor, 1.0)
        )


@dataclass(frozen=True, kw_only=True)
class Diurnal(Arrivals):
    """A Poisson process with the rate ``rate`` · (1 + ``amplitude`` · sin(2π t / ``period``))."""

    above_zero = ("rate", "period")
    rate: float = 1.0
    amplitude: float = 0.8
    period: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.amplitude <= 1:
            raise ValueError(f"arrival.amplitude={self.amplitude:g}: give a share of the rate from 0 to 1")

    def times(self, rng: np.random.Generator, count: int) -> Times:
        amplitude, turn = self.amplitude, 2 * np.pi / self.period
        return _thinned(rng, count, self.rate, lambda at: 1 + amplitude * np.sin(turn * at), 1 + amplitude)


@dataclass(frozen=True, kw_only=True)
class Ramp(Arrivals):
    """A Poisson process whose rate goes from ``rate`` to ``factor`` times that in ``length`` seconds, and stays there.

    Attributes:
        rate: Requests per second at the beginning.
        exponential: Whether the rate grows by equal factors in equal times; else by equal amounts.
    """

    above_zero = ("rate", "factor", "length")
    rate: float = 1.0
    factor: float = 4.0
    length: float = 30.0
    exponential: bool = False

    def times(self, rng: np.random.Generator, count: int) -> Times:
        def intensity(at: Times) -> Times:
            way = np.clip(at / self.length, 0.0, 1.0)
            return self.factor**way if self.exponential else 1 + (self.factor - 1) * way

        return _thinned(rng, count, self.rate, intensity, max(self.factor, 1.0))


@dataclass(frozen=True, kw_only=True)
class Batch(Arrivals):
    """All requests at once: throughput and cost are all that counts, and nobody waits for a first token."""

    above_zero = ()

    @property
    def rate(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Requests per second: without end."""
        return float("inf")

    def at_rate(self, rate: float) -> Self:
        raise ValueError("rates and arrival=batch are both given: all requests come at once, give rates=null")

    def times(self, rng: np.random.Generator, count: int) -> Times:
        return np.zeros(count)


@dataclass(frozen=True, kw_only=True)
class Users(Arrivals):
    """Users who ask again when they have their answer: a closed loop.

    It hides overload, because a slow engine is asked less.

    Attributes:
        think: Seconds from an answer to the next question, on average (exponential).
    """

    loop = CLOSED
    rate: float = 4
    think: float = 0.0

    def __post_init__(self) -> None:
        if self.rate < 1 or self.rate != int(self.rate):
            raise ValueError(f"arrival.rate={self.rate:g}: give a number of users, at least 1")
        if not (np.isfinite(self.think) and self.think >= 0):
            raise ValueError(f"arrival.think={self.think:g}: give seconds from 0 on")

    def times(self, rng: np.random.Generator, count: int) -> Times:
        """Return how long each user thinks before the request; the first of every user's come at once."""
        thinking = rng.exponential(self.think, count) if self.think else np.zeros(count)
        thinking[: int(self.rate)] = 0.0
        return thinking


def _thinned(rng: np.random.Generator, count: int, rate: float, intensity: Any, most: float) -> Times:
    """Return the times of a Poisson process of varying rate, by thinning a faster one (Lewis, Shedler 1979)."""
    kept, last = np.zeros(0), 0.0
    while len(kept) < count:
        more = last + rng.exponential(1 / (rate * most), 2 * count + 16).cumsum()
        last = more[-1]
        kept = np.concatenate([kept, more[rng.random(len(more)) * most < intensity(more)]])
    return kept[:count]


def arriving(
    arrivals: Arrivals, rng: np.random.Generator, *, requests: int | None, seconds: float | None = None
) -> Times:
    """Return the moments of requests: a number of them, those of so many seconds, or what both allow; not none."""
    if requests is None and (seconds is None or arrivals.loop == CLOSED):
        raise ValueError("requests=null: give a number of requests, or seconds=… with an open loop")
    if seconds is not None and arrivals.loop == CLOSED:
        raise ValueError(f"seconds={seconds:g}: in a closed loop answers decide when requests come, give seconds=null")
    state = rng.bit_generator.state
    count = requests or 64
    times = arrivals.times(rng, count)
    while requests is None and len(times) == count and times[-1] < (seconds or 0):
        rng.bit_generator.state = state
        count *= 2
        times = arrivals.times(rng, count)
    if seconds is not None:
        times = times[times < seconds]
    if not len(times):
        raise ValueError(f"seconds={seconds:g}: no request arrives so early, give more")
    return times
