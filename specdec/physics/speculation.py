"""What speculation brings: tokens per round from acceptance, speedup from tokens and costs; what requests then cost."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from specdec.physics.precision import Precision
from specdec.physics.rounds import RoundCost, round_seconds
from specdec.physics.shape import ModelShape

Acceptance = float | Sequence[float]
"""How likely a drafted token is accepted, given that those before it were: one probability, or one by position."""


def chain_tokens(acceptance: Acceptance, drafted: int) -> float:
    """Return the expected number of tokens that a round with a chain of drafts emits, the last one included.

    With one rate a it is (1 - a^(K+1)) / (1 - a) (Leviathan et al. 2023, equation 1). A position beyond the last one of
    ``acceptance`` has the last one's probability.
    """
    rates = [acceptance] if isinstance(acceptance, float | int) else acceptance
    return sum(accumulate((rates[min(place, len(rates) - 1)] for place in range(drafted)), mul, initial=1.0))


def rate_for(tokens: float, drafted: int) -> float | None:
    """Return the acceptance at which rounds bring so many tokens; None if none does, 0 if the last token suffices."""
    if tokens > drafted + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_tokens(middle, drafted) < tokens else (low, middle)
    return high if tokens > 1 else 0.0


def speedup_of(cost: RoundCost, acceptance: Acceptance, *, batch: int, drafted: int, context: float) -> float:
    """Return the speed of rounds with chains of so many tokens over plain decoding's, at the same load."""
    plain = round_seconds(cost, batch=batch, drafted=0, context=context)
    seconds = round_seconds(cost, batch=batch, drafted=drafted, context=context)
    return chain_tokens(acceptance, drafted) * plain / seconds


def target_efficiency(cost: RoundCost, *, batch: int, drafted: int, context: float) -> float:
    """Return the seconds of a plain step over those of verifying (MoESD, arXiv 2505.19645): 1 where that is free."""
    plain = cost.verify(batch=batch, drafted=0, context=context)
    return plain / cost.verify(batch=batch, drafted=drafted, context=context)


@dataclass(frozen=True)
class BestLength:
    """The drafted tokens per row that are fastest, 0 for plain decoding, and their speed over plain decoding's."""

    drafted: int
    speedup: float


def best_length(cost: RoundCost, acceptance: Acceptance, *, batch: int, context: float, longest: int) -> BestLength:
    """Return the length of chains that is fastest, out of none to ``longest``."""
    at = {"batch": batch, "context": context}
    found = BestLength(0, 1.0)
    for drafted in range(1, longest + 1):
        speed = speedup_of(cost, acceptance, drafted=drafted, **at)
        if speed > found.speedup:
            found = BestLength(drafted, speed)
    return found


def break_even_batch(
    cost: RoundCost, acceptance: Acceptance, *, drafted: int, context: float, most: int = 1 << 14
) -> int | None:
    """Return the largest batch up to ``most`` at which speculation is no slower; 0 for none, None if it pays there.

    With experts it may be slower for few rows, too, which this does not say.
    """

    def pays(batch: int) -> bool:
        return speedup_of(cost, acceptance, batch=batch, drafted=drafted, context=context) >= 1

    if pays(most):
        return None
    high = most
    while high > 1 and not pays(high // 2):
        high //= 2
    low = high // 2  # it pays at low and not at high
    return low + bisect_left(range(low + 1, high), True, key=lambda batch: not pays(batch))


def critical_context(shape: ModelShape, precision: Precision, *, ridge: float, drafted: float = 0) -> float | None:
    """Return the context from which a step is bound by memory however many rows there are; None if there is none.

    With very many rows, reading the weights costs nothing per row: what is left per row is its keys and values, and
    the operations of its tokens. From this context on, their ratio stays below the ``ridge`` (MagicDec, arXiv
    2408.11049). Layers with a window are taken to see all of it.
    """
    nodes = drafted + 1
    least, left = 2.0 * nodes * (shape.active_weights + shape.output_weights), 0.0
    for layer, count in shape.groups:
        for part in layer.attending:
            hidden = count * (ridge * precision.kept(part) - nodes * part.pair_flops)  # operations per position
            if part.window is None:
                left += hidden
            else:
                least -= hidden * part.window
    return max(least, 0.0) / left if left > 0 else None


def latency(first: float, per_token: float, tokens: int) -> float:
    """Return the seconds from a request's arrival to the last of its output ``tokens``: TTFT + (N - 1) · TPOT."""
    return first + (tokens - 1) * per_token


def price_per_million(price: float, tokens_per_second: float) -> float:
    """Return the price of a million tokens, from a device's price per hour."""
    return price * 1e6 / (3600 * tokens_per_second)
