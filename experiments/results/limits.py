"""The limits that a user sets on latency (a service-level agreement), and a price. Settings are checked with them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


def seconds_of(value: object) -> float:
    """Return a duration in seconds: a number above 0, or a text with a unit such as ``200ms``."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(us|ms|s|min)?\s*", value)
        seconds = float(match[1]) * _UNITS[match[2] or "s"] if match else math.nan
    else:
        seconds = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError("give seconds above 0, or a number with a unit (us, ms, s, min) such as 200ms")
    return seconds


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Upper limits of a request's latencies in seconds (``requests.LATENCIES``); None where there is no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __str__(self) -> str:
        words = {"TTFT": self.ttft, "TPOT": self.tpot, "e2e": self.e2e}
        texts = {name: f"{1000 * v:g} ms" if v < 1 else f"{v:g} s" for name, v in words.items() if v is not None}
        return ", ".join(f"{name} ≤ {text}" for name, text in texts.items())


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Limits on the latencies of requests, and the price of the device per hour, in any currency."""

    limits: Limits | None = None
    price: float | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Terms":
        """Return the terms of a run's configuration."""
        given = {name: seconds_of(value) for name, value in (config.get("sla") or {}).items() if value is not None}
        return cls(limits=Limits(**given) if given else None, price=config.get("price"))
