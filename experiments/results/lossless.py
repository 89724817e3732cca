"""The verdict on an exact rule at temperature 0: is the output plain decoding's, token for token?"""

import math
from dataclasses import dataclass
from enum import StrEnum

import pandas

from experiments.results.frame import Frame, Outputs, frame_of
from experiments.results.records import Record

EXACT = "exact"
"""What a rule promises whose output follows the target, where a check has confirmed it."""
DECLARED = "exact (declared)"
"""The same promise, where no check has confirmed it yet (``experiments.results.checked``)."""
OTHER_TARGET = "another target"
"""What is said of plain decoding with other weights or another cache than the run's own plain decoding."""
THERE = f" for {OTHER_TARGET}"
"""Stands behind what a rule promises on such a target."""
NOT_LOSSLESS = "NOT LOSSLESS"
"""The verdict that no table, picture or exit code may hide."""


def promises_exact(exactness: str | None) -> bool:
    """Whether a rule promises the target's own distribution, checked or not."""
    return exactness in (EXACT, DECLARED)


def promises_equality(exactness: str | None) -> bool:
    """Whether greedy outputs have to equal plain decoding's on the same target, which may be another one."""
    return exactness is not None and promises_exact(exactness.removesuffix(THERE))


def of_another_target(exactness: str | None) -> bool:
    """Whether outputs follow the law of another target than the run's plain decoding."""
    return exactness is not None and exactness.endswith(OTHER_TARGET)


class Verdict(StrEnum):
    """What a comparison of greedy outputs with plain decoding's shows."""

    EQUAL = "equal"
    """All outputs are equal."""
    TIES = "ties"
    """Some differ, each from a place on where the dtype cannot tell the two tokens apart."""
    NOT_LOSSLESS = "not lossless"
    """Some differ by more than the dtype explains: the method is broken."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where a greedy output first differs from plain decoding's.

    Attributes:
        prompt, turn, sample: Whose output it is.
        index: Number of the output token, from 0.
        tokens: The method's token and plain decoding's; None where that output has ended. Empty if not recorded.
        texts: The two as text.
        margin: How far the lower of the two is below the largest logit, in nats (``Record.margin``).
        tie_bound: The margin that the dtype explains at this place, in nats.
    """

    prompt: str
    turn: int = 0
    sample: int = 0
    index: int
    tokens: tuple[int | None, ...] = ()
    texts: tuple[str | None, ...] = ()
    margin: float | None
    tie_bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class Lossless:
    """The verdict on one method, with its evidence.

    Attributes:
        verdict: What the comparison shows.
        compared: Outputs that were compared with plain decoding's.
        divergences: Those of them that differ.
        unexplained: Those of the divergences that are larger than the dtype explains.
        largest_margin: The margin of the worst divergence, in nats; None without divergences, or where one output
            ends and the other goes on after the same tokens, which no dtype explains.
        tie_bound: The margin that the dtype explains at that very place, in nats; None without divergences.
        worst: The worst divergence: of those that the dtype does not explain, or else of all, that of the largest
            margin.
    """

    verdict: Verdict
    compared: int = 0
    divergences: int
    unexplained: int
    largest_margin: float | None
    tie_bound: float | None
    worst: Divergence | None = None


def judge(outputs: Outputs) -> Lossless | None:
    """The verdict over one method's outputs at one temperature; None where nothing could be compared.

    Sampled outputs, outputs of lossy rules and failures are not compared. There is no verdict either where a margin
    stands without the bound that it is judged by.
    """
    frame = frame_of(outputs)
    compared = frame[~frame.failed & frame.equals_plain.notna() & frame.exactness.map(promises_equality).astype(bool)]
    divergent = compared[~compared.equals_plain.astype(bool)]
    if compared.empty or (divergent.margin.notna() & divergent.tie_bound.isna()).any():
        return None
    if divergent.empty:
        return Lossless(
            verdict=Verdict.EQUAL,
            compared=len(compared),
            divergences=0,
            unexplained=0,
            largest_margin=None,
            tie_bound=None,
        )
    listed = divergences_of(divergent)
    unexplained = sum(not explained(each) for each in listed)
    worst = max(listed, key=lambda each: (not explained(each), _margin(each)))
    return Lossless(
        verdict=Verdict.NOT_LOSSLESS if unexplained else Verdict.TIES,
        compared=len(compared),
        divergences=len(divergent),
        unexplained=unexplained,
        largest_margin=worst.margin,
        tie_bound=worst.tie_bound,
        worst=worst,
    )


def divergences_of(frame: Frame) -> tuple[Divergence, ...]:
    """Return where the outputs of a frame leave plain decoding's, as far as they do."""
    found = frame[frame.divergence.notna()]
    return tuple(
        Divergence(
            prompt=row.prompt,
            turn=row.turn,
            sample=row.sample,
            index=int(row.divergence),
            tokens=row.tokens_at_divergence,
            texts=row.texts_at_divergence,
            margin=None if pandas.isna(row.margin) else row.margin,
            tie_bound=None if pandas.isna(row.tie_bound) else row.tie_bound,
        )
        for row in found.itertuples()
    )


def explained(divergence: Divergence | Record) -> bool:
    """Whether a divergence is within what the dtype explains at its place.

    A bound of 0 explains nothing: it comes from an invariant engine, where even a margin of 0 is no excuse, because
    equal logits are decided by the token's id.
    """
    return bool(divergence.tie_bound) and _margin(divergence) <= divergence.tie_bound


def _margin(divergence: Divergence | Record) -> float:
    return math.inf if divergence.margin is None else divergence.margin
