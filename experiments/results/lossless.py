"""The verdict on an exact rule at temperature 0: is the output plain decoding's, token for token?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from experiments.results.records import Record


class Verdict(StrEnum):
    """What a comparison of greedy outputs with plain decoding's shows."""

    EQUAL = "equal"
    """All outputs are equal."""
    TIES = "ties"
    """Some differ, each from a place on where the dtype cannot tell the two tokens apart."""
    NOT_LOSSLESS = "not lossless"
    """Some differ by more than the dtype explains: the method is broken."""


@dataclass(frozen=True, kw_only=True)
class Lossless:
    """The verdict on one method, with its evidence.

    Attributes:
        verdict: What the comparison shows.
        divergences: Outputs that differ from plain decoding's.
        unexplained: Those of them that differ by more than the dtype explains.
        largest_margin: The largest margin at a divergence, in nats; None without divergences, or where one output
            ends and the other goes on after the same tokens, which no dtype explains.
        tie_bound: The margin that the dtype explains at that very place, in nats; None without divergences.
    """

    verdict: Verdict
    divergences: int
    unexplained: int
    largest_margin: float | None
    tie_bound: float | None


def judge(records: Sequence[Record]) -> Lossless | None:
    """The verdict over one method's records at one temperature; None where nothing could be compared.

    Sampled outputs, outputs of lossy rules and failures are not compared.
    """
    compared = [r for r in records if not r.failed and r.equals_plain is not None and r.exactness == "exact"]
    if not compared:
        return None
    divergent = [record for record in compared if not record.equals_plain]
    if not divergent:
        return Lossless(verdict=Verdict.EQUAL, divergences=0, unexplained=0, largest_margin=None, tie_bound=None)
    unexplained = sum(not explained(record) for record in divergent)
    worst = max(divergent, key=lambda record: (not explained(record), _margin(record)))
    return Lossless(
        verdict=Verdict.NOT_LOSSLESS if unexplained else Verdict.TIES,
        divergences=len(divergent),
        unexplained=unexplained,
        largest_margin=worst.margin,
        tie_bound=worst.tie_bound,
    )


def explained(record: Record) -> bool:
    """Whether a divergence is within what the dtype explains at its place."""
    return record.tie_bound is not None and _margin(record) <= record.tie_bound


def _margin(record: Record) -> float:
    return math.inf if record.margin is None else record.margin
