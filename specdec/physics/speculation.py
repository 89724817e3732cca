"""What speculation brings: tokens per round from acceptance, and speedup from tokens and costs."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from specdec.physics.rounds import RoundCost, round_seconds


def tokens_per_round(acceptance: Sequence[float]) -> float:
    """Return the expected number of tokens that a round with a chain of drafts emits, the last one included.

    With the same rate at all of K positions this is (1 - a^(K+1)) / (1 - a) (Leviathan et al. 2023, equation 1).

    Args:
        acceptance: The probability that each position is accepted, given that all before it were.
    """
    return sum(accumulate(acceptance, mul, initial=1.0))


def speedup(tokens: float, *, plain: float, verify: float, draft: float = 0.0, outside: float = 0.0) -> float:
    """Return the speed of speculation over plain decoding's, from tokens per round and seconds of a round's parts.

    ``plain`` is a whole round of plain decoding; ``outside`` is acceptance, commit and the host.
    """
    return tokens * plain / (verify + draft + outside)


Acceptance = float | Sequence[float]
"""How likely a drafted token is accepted, given that those before it were: one probability, or one by position."""


def chain_tokens(acceptance: Acceptance, drafted: int) -> float:
    """Return the expected number of tokens of a round with a chain of so many drafted tokens.

    A position beyond the last one of ``acceptance`` has the last one's probability.
    """
    if isinstance(acceptance, float | int):
        return tokens_per_round([acceptance] * drafted)
    return tokens_per_round([acceptance[min(place, len(acceptance) - 1)] for place in range(drafted)])


def rate_for(tokens: float, drafted: int) -> float | None:
    """Return the acceptance of every drafted token at which rounds bring so many tokens (``chain_tokens``).

    Of the tokens that a round must bring to pay, the seconds of a round over those of a plain step, it is the
    break-even acceptance.

    Returns:
        0 if fewer than the last token suffice; None if not even drafts that are always accepted bring so many.
    """
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
    """Return the seconds of the target's plain step over those of verifying: 1 where verification is free.

    It depends on the device and not on acceptance (MoESD, arXiv 2505.19645).
    """
    plain = cost.verify(batch=batch, drafted=0, context=context)
    return plain / cost.verify(batch=batch, drafted=drafted, context=context)


@dataclass(frozen=True)
class BestLength:
    """The drafted tokens per row that are fastest, 0 for plain decoding, and their speed over plain decoding's."""

    drafted: int
    speedup: float


def best_length(cost: RoundCost, acceptance: Acceptance, *, batch: int, context: float, longest: int) -> BestLength:
    """Return the length of chains that is fastest, out of none to ``longest``; for the others see ``speedup_of``."""
    found = BestLength(0, 1.0)
    for drafted in range(1, longest + 1):
        speed = speedup_of(cost, acceptance, batch=batch, drafted=drafted, context=context)
        if speed > found.speedup:
            found = BestLength(drafted, speed)
    return found


def gain(cost: RoundCost, acceptance: Acceptance, *, batch: int, drafted: int, context: float) -> float:
    """Return the seconds that a round saves against decoding its tokens plainly; below 0 where speculation costs time.

    With fitted constants this is (Ω - 1)(δ + αBS + outside) - γB(K + 1 - Ω) - draft: whatever does not depend on the
    number of tokens is shared by the Ω tokens of a round, and rejected tokens are paid for.
    """
    tokens = chain_tokens(acceptance, drafted)
    plain = round_seconds(cost, batch=batch, drafted=0, context=context)
    return tokens * plain - round_seconds(cost, batch=batch, drafted=drafted, context=context)


def break_even_batch(
    cost: RoundCost, acceptance: Acceptance, *, drafted: int, context: float, most: int = 1 << 14
) -> int | None:
    """Return the largest batch at which speculation is no slower than plain decoding.

    With experts it may be slower for few rows, too, which this does not say. Batches up to ``most`` are considered; the
    other arguments are those of ``speedup_of``.

    Returns:
        0 if it is slower at every power of two; None if it pays at ``most``.
    """

    def pays(batch: int) -> bool:
        return gain(cost, acceptance, batch=batch, drafted=drafted, context=context) >= 0

    if pays(most):
        return None
    high = most
    while high > 1 and not pays(high // 2):
        high //= 2
    low = high // 2  # it pays at low and not at high
    return low + bisect_left(range(low + 1, high), True, key=lambda batch: not pays(batch))


def critical_context(
    *, flops: float, pair_flops: float, kv_bytes: float, ridge: float, drafted: float = 0
) -> float | None:
    """Return the context from which a step is bound by memory however many rows there are.

    With very many rows, reading the weights costs nothing per row: what is left per row is its keys and values, and
    the operations of its tokens. From this context on, their ratio stays below the ridge (MagicDec, arXiv 2408.11049).

    Args:
        flops: Operations per token in products with weights.
        pair_flops: Operations of attention per token and position.
        kv_bytes: Bytes that the cache keeps per position.
        ridge: Operations per byte above which the device is bound by operations.
        drafted: Drafted nodes per row.

    Returns:
        None if there is no such context, because attention alone is above the ridge.
    """
    nodes = drafted + 1
    left = ridge * kv_bytes - pair_flops * nodes
    return flops * nodes / left if left > 0 else None


def intensity_of_many_rows(
    *, flops: float, pair_flops: float, kv_bytes: float, context: float, drafted: float = 0
) -> float:
    """Return the operations per byte of a step with so many rows that reading the weights costs nothing per row.

    ``context`` counts positions in a row's cache; the other arguments are those of ``critical_context``.
    """
    return (drafted + 1) * (flops + pair_flops * context) / (kv_bytes * context)
