"""The limits that a user sets on latency (a service-level agreement), and a price. Settings are checked with them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


def seconds_of(value: object) -> float:
    """Return a duration in seconds: a number of seconds, or a text with a unit such as ``200ms``.

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
        """Return the limits of a configuration's section ``sla``; None if it sets none.

        Raises:
            ValueError: A limit is no duration above 0.
        """
        known = [field.name for field in fields(cls)]
        given = {name: seconds_of(section[name]) for name in known if (section or {}).get(name) is not None}  # type: ignore[index]
        return cls(**given) if given else None

    def __str__(self) -> str:
        words = {"TTFT": self.ttft, "TPOT": self.tpot, "e2e": self.e2e}
        return ", ".join(f"{name} ≤ {_short(value)}" for name, value in words.items() if value is not None)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a user asks of requests.

    Attributes:
        limits: Limits on their latencies; None if there are none.
        price: What the device costs per hour, in any currency; None if it is not given.
    """

    limits: Limits | None = None
    price: float | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Terms":
        """Return the terms of a run's configuration."""
        return cls(limits=Limits.of(config.get("sla")), price=config.get("price"))


def _short(seconds: float) -> str:
    return f"{1000 * seconds:g} ms" if seconds < 1 else f"{seconds:g} s"
