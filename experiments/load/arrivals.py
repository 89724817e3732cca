"""When requests arrive: processes with a rate, users who wait for an answer, and recorded traffic."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas
from jaxtyping import Float

from experiments.load.run import CLOSED, OPEN, Frame
from specdec.arguments import number

Times = Float[np.ndarray, " request"]
BUNDLED = Path(__file__).parent / "traces"
"""Azure's traces of 2023 (CC-BY 4.0; see the file ATTRIBUTION there)."""
_AZURE = "TIMESTAMP", "ContextTokens", "GeneratedTokens"
_FORMATS = _AZURE, ("Timestamp", "Request tokens", "Response tokens")
"""The columns of Azure's and of BurstGPT's traces: times, tokens of prompts, tokens of answers."""


class Arrivals(ABC):
    """When requests arrive. Made from a seed, so the same for every method."""

    loop = OPEN
    rate: float
    """Requests per second, on average."""

    @abstractmethod
    def times(self, rng: np.random.Generator, count: int) -> Times:
        """Return when the first ``count`` requests arrive, in seconds, ascending."""

    def at_rate(self, rate: float) -> Self:
        """Return the same process with another rate."""
        return replace(self, rate=rate)  # pyright: ignore[reportArgumentType] - all processes are dataclasses


def _check(process: Arrivals, *names: str, from_zero: Sequence[str] = ()) -> None:
    for name in (*names, *from_zero):
        least = "from 0 on" if name in from_zero else "above 0"
        test = lambda value, zero=name in from_zero: 0 < value < np.inf or (zero and value == 0)  # noqa: E731
        number(f"arrival.{name}", getattr(process, name), f"give a number {least}", test)


@dataclass(frozen=True, kw_only=True)
class Gaps(Arrivals):
    """Independent gaps between requests, with a gamma distribution and the coefficient of variation ``cv``.

    0 is a request every 1 / ``rate`` seconds, 1 a Poisson process, more comes in bursts. vLLM's burstiness is 1 / cv².
    """

    rate: float = 1.0
    cv: float = 1.0

    def __post_init__(self) -> None:
        _check(self, "rate", from_zero=["cv"])

    def times(self, rng: np.random.Generator, count: int) -> Times:
        if not self.cv:
            return np.arange(count) / self.rate
        shape = 1 / self.cv**2
        return rng.gamma(shape, 1 / (shape * self.rate), count).cumsum()


@dataclass(frozen=True, kw_only=True)
class Spike(Arrivals):
    """A Poisson process whose rate is ``factor`` times as high from ``begin`` on, for ``length`` seconds."""

    rate: float = 1.0
    factor: float = 5.0
    begin: float = 10.0
    length: float = 5.0

    def __post_init__(self) -> None:
        _check(self, "rate", "factor", "length", from_zero=["begin"])

    def times(self, rng: np.random.Generator, count: int) -> Times:
        expected = rng.exponential(1 / self.rate, count).cumsum()  # without the spike; it makes this time run faster
        end = self.begin + self.factor * self.length
        inside = np.clip(expected, self.begin, end) - self.begin
        return np.minimum(expected, self.begin) + inside / self.factor + np.clip(expected - end, 0, None)


@dataclass(frozen=True, kw_only=True)
class Users(Arrivals):
    """Users who ask again when they have their answer: a closed loop.

    It hides overload, because a slow engine is asked less.

    Attributes:
        think: float from an answer to the next question, on average (exponential).
    """

    loop = CLOSED
    rate: float = 4
    think: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "rate", from_zero=["think"])
        if self.rate != int(self.rate):
            raise ValueError(f"arrival.rate={self.rate:g}: give a number of users, at least 1")

    def times(self, rng: np.random.Generator, count: int) -> Times:
        """Return how long each user thinks before the request; every user's first one comes at once."""
        thinking = rng.exponential(self.think, count)
        thinking[: int(self.rate)] = 0.0
        return thinking


@dataclass(frozen=True)
class Trace(Arrivals):
    """Requests as they came somewhere else.

    Args:
        path: A file as ``read`` takes it, or ``azure_code`` or ``azure_conversation`` for Azure's of 2023, which are
            bundled.
        scale: The rate is multiplied by this.
        window: The part of the trace to take, in its own seconds from its beginning; None for all.
    """

    path: str = "azure_conversation"
    scale: float = 1.0
    window: list[float] | None = None

    def __post_init__(self) -> None:
        _check(self, "scale")
        window = self.window or [0, 1]
        if not (len(window) == 2 and 0 <= window[0] < window[1]):
            raise ValueError(f"arrival.window={list(window)}: give [from, to] in seconds, the first one smaller")

    @cached_property
    def recorded(self) -> Frame:
        """The requests in the window, the first of which comes at 0; see ``read``."""
        bundled = BUNDLED / f"{self.path}.csv.gz"
        rows = read(bundled if bundled.is_file() else Path(self.path).expanduser())
        if self.window is not None:
            rows = rows[(rows.time >= self.window[0]) & (rows.time < self.window[1])]
            if rows.empty:
                raise ValueError(f"arrival.window={list(self.window)}: nothing arrives then in {self.path}")
        return rows.assign(time=(rows.time - rows.time.iloc[0]) / self.scale)

    @property
    def rate(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Requests per second, the scale included."""
        times = self.recorded.time
        return (len(times) - 1) / times.iloc[-1] if times.iloc[-1] else 1.0

    def at_rate(self, rate: float) -> Self:
        """Return the trace, faster or slower."""
        return replace(self, scale=self.scale * rate / self.rate)

    def times(self, rng: np.random.Generator, count: int) -> Times:
        return self.recorded.time.to_numpy()[:count]


def read(path: Path) -> Frame:
    """Return the requests of a trace of Azure's (2023 or 2024) or BurstGPT's, whose format is found by its columns.

    Returns:
        By request ``time`` in seconds since the first one, and tokens of the prompt (``inputs``) and the answer
        (``outputs``).

    Raises:
        ValueError: It cannot be read, is empty or unsorted, or a row is malformed (with its line).
    """

    def refused(why: str) -> ValueError:
        return ValueError(f"arrival.path={path}: {why}")

    try:
        table: Frame = pandas.read_csv(path, dtype=str, keep_default_na=False, index_col=False)
    except (OSError, EOFError, ValueError) as error:  # pandas' errors are ValueErrors, too
        why = f"cannot be read ({str(error).strip()}), give a file or one of azure_code, azure_conversation"
        raise refused(why) from error
    columns = next((names for names in _FORMATS if set(names) <= set(table.columns)), None)
    if columns is None or table.empty:
        wanted = " or ".join(",".join(names) for names in _FORMATS)
        raise refused(f"no requests in known columns: give a trace that begins with {wanted}")
    texts = table[list(columns)].set_axis(["time", "inputs", "outputs"], axis=1)
    rows = texts.apply(pandas.to_numeric, errors="coerce")
    if columns == _AZURE:
        moments: Any = pandas.to_datetime(texts.time, errors="coerce", format="ISO8601", utc=True)
        rows["time"] = (moments - moments.iloc[0]).dt.total_seconds()
    wrong = ~np.isfinite(rows.to_numpy(np.float64)).all(axis=1) | (rows[["inputs", "outputs"]] < 0).any(axis=1)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise refused(f"line {place + 2} is {','.join(texts.iloc[place])!r}: give a time and two counts")
    if (falling := rows.time.diff() < 0).any():
        raise refused(f"line {int(np.argmax(falling)) + 2} is earlier than the one before, sort the trace")
    # Some records have answers of no token, which ended before their first one.
    counts = rows[["inputs", "outputs"]].astype("int64").clip(lower=1)
    return counts.assign(time=rows.time - rows.time.iloc[0])
