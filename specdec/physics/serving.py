"""From the times of steps to what requests take, cost and occupy."""


def latency(first: float, per_token: float, tokens: int) -> float:
    """Return the seconds from a request's arrival to the last of its output ``tokens``: TTFT + (N - 1) · TPOT."""
    return first + (tokens - 1) * per_token


def price_per_million(price: float, tokens_per_second: float) -> float:
    """Return the price of a million tokens of a device, from its price per hour and what it makes over all rows."""
    return price * 1e6 / (3600 * tokens_per_second)


def all_reduce_seconds(
    *, devices: int, tokens: float, hidden: int, number_bytes: float, bandwidth: float, latency: float = 0.0
) -> float:
    """Return the seconds of one sum over devices that share a model; a layer needs two.

    Args:
        tokens: Tokens of the step.
        hidden: Width of the residual stream, whose numbers have ``number_bytes``.
        bandwidth: Bytes per second of the link.
        latency: Seconds until the first byte arrives.
    """
    if devices == 1:
        return 0.0
    return 2 * (devices - 1) / devices * tokens * hidden * number_bytes / bandwidth + latency
