"""From the times of steps to what requests take, cost and occupy."""


def latency(first: float, per_token: float, tokens: int) -> float:
    """Return the seconds from a request's arrival to its last token: TTFT + (N - 1) · TPOT.

    Args:
        first: Seconds to the first token.
        per_token: Seconds per token after it.
        tokens: Output tokens, the first one included.
    """
    return first + (tokens - 1) * per_token


def price_per_million(price: float, tokens_per_second: float) -> float:
    """Return the price of a million tokens.

    Args:
        price: Price of the device per hour.
        tokens_per_second: What it makes, over all rows.
    """
    return price * 1e6 / (3600 * tokens_per_second)


def all_reduce_seconds(
    *, devices: int, tokens: float, hidden: int, number_bytes: float, bandwidth: float, latency: float = 0.0
) -> float:
    """Return the seconds of one sum over devices that share a model; a layer needs two.

    Args:
        devices: How many there are.
        tokens: Tokens of the step.
        hidden: Width of the residual stream.
        number_bytes: Bytes of a number in it.
        bandwidth: Bytes per second of the link.
        latency: Seconds until the first byte arrives.
    """
    if devices == 1:
        return 0.0
    return 2 * (devices - 1) / devices * tokens * hidden * number_bytes / bandwidth + latency
