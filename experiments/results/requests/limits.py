"""The limits that a user sets on latency (a service-level agreement), and how many requests keep all of them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.results.requests.timeline import Timeline  # for types only: settings are checked with this module

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


def seconds_of(value: object) -> float:
    """Returns a duration in seconds: a number of seconds, or a text with a unit such as ``200ms``.

    Raises:
        ValueError: It is neither, or not above 0.
    """
    wanted = "give seconds above 0, or a number with a unit (us, ms, s, min) such as 200ms"
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(us|ms|s|min)?\s*", value)
        found = float(match[1]) * _UNITS[match[2] or "s"] if match else math.nan
    else:
        found = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(found) and found > 0):
        raise ValueError(wanted)
    return found


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Upper limits of a request's latencies in seconds; None where there is no limit.

    Attributes:
        ttft: The longest time to first token, the queue included.
        tpot: The longest time per output token. A request of one token has no such time, and keeps the limit.
        e2e: The longest time from arrival to end.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def of(cls, section: Mapping[str, Any] | None) -> "Limits | None":
        """Returns the limits of a configuration's section ``sla``; None if it sets none.

        Raises:
            ValueError: A limit is no duration above 0.
        """
        known = [field.name for field in fields(cls)]
        given = {name: seconds_of(section[name]) for name in known if (section or {}).get(name) is not None}  # type: ignore[index]
        return cls(**given) if given else None

    def met_by(self, request: "Timeline") -> bool:
        """Returns whether a request ended well and kept every limit."""
        if request.finished is None or request.ttft is None or request.e2e is None:
            return False
        kept = ((self.ttft, request.ttft), (self.tpot, request.tpot), (self.e2e, request.e2e))
        return all(limit is None or value is None or value <= limit for limit, value in kept)

    def __str__(self) -> str:
        words = {"TTFT": self.ttft, "TPOT": self.tpot, "e2e": self.e2e}
        return ", ".join(f"{name} ≤ {_short(value)}" for name, value in words.items() if value is not None)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """How many requests keep every limit.

    Attributes:
        limits: The limits in words.
        good: Those that do.
        arrived: All that arrived. Those that failed or never ended count as missed.
        attainment: Good over arrived.
        per_second: Good over the time that all took.
    """

    limits: str
    good: int
    arrived: int
    attainment: float | None
    per_second: float | None


def goodput(requests: Sequence["Timeline"], limits: Limits, *, arrived: int, seconds: float) -> Goodput:
    """Returns the goodput of requests.

    Ten requests in 5 s, of which seven keep all limits: attainment 0.7, goodput 1.4 requests/s.

    Args:
        requests: Those whose timestamps are known.
        limits: What each has to keep.
        arrived: How many arrived in all.
        seconds: How long all of them took together.
    """
    good = sum(limits.met_by(request) for request in requests)
    return Goodput(
        limits=str(limits),
        good=good,
        arrived=arrived,
        attainment=good / arrived if arrived else None,
        per_second=good / seconds if seconds else None,
    )


def _short(seconds: float) -> str:
    return f"{1000 * seconds:g} ms" if seconds < 1 else f"{seconds:g} s"
