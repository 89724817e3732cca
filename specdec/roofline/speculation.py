"""What speculation brings: tokens per round from acceptance, and speedup from tokens and costs."""

from collections.abc import Sequence


def tokens_per_round(acceptance: Sequence[float]) -> float:
    """Returns the expected number of tokens that a round with a chain of drafts emits, the last one included.

    With the same rate at all of K positions this is (1 - a^(K+1)) / (1 - a) (Leviathan et al. 2023, equation 1).

    Args:
        acceptance: The probability that each position is accepted, given that all before it were.
    """
    total, reached = 1.0, 1.0
    for rate in acceptance:
        reached *= rate
        total += reached
    return total


def speedup(tokens: float, *, plain: float, verify: float, draft: float = 0.0, outside: float = 0.0) -> float:
    """Returns the speed of speculation over plain decoding's.

    Args:
        tokens: Tokens per round.
        plain: Seconds of a round of plain decoding.
        verify: Seconds of the forward that verifies.
        draft: Seconds of drafting, per round.
        outside: Seconds of everything else in a round: acceptance, commit, the host.
    """
    return tokens * plain / (verify + draft + outside)
