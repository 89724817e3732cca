"""What tokens cost: time of the device, money, energy."""

PER_MILLION = 1e6
LEAST_SECONDS = 10.0
"""Energy of a shorter time is not told: counters move in steps of up to 100 ms, and devices warm up."""


def device_hours_per_million(tokens_per_second: float | None) -> float | None:
    """Returns the hours that one device needs for a million output tokens: 11.57 at 24 tokens/s."""
    return PER_MILLION / (3600 * tokens_per_second) if tokens_per_second else None


def price_per_million(tokens_per_second: float | None, per_hour: float | None) -> float | None:
    """Returns the price of a million output tokens on a device that costs so much per hour.

    At 2 per hour and 24 tokens/s it is 23.15.
    """
    hours = device_hours_per_million(tokens_per_second)
    return None if hours is None or per_hour is None else hours * per_hour


def joules_per_token(joules: float | None, tokens: int, seconds: float) -> float | None:
    """Returns the energy per output token; None if it was not measured, or not for long enough to mean something."""
    return joules / tokens if joules is not None and tokens and seconds >= LEAST_SECONDS else None
