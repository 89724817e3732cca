"""The verdict on an exact rule at temperature 0: is the output plain decoding's, token for token?"""

import math
from enum import StrEnum
from typing import Any

import pandas

from experiments.results.frame import Figures, Frame, Outputs, frame_of
from experiments.results.records import DECLARED, EXACT

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


def judge(outputs: Outputs) -> Figures | None:
    """The verdict over one method's outputs at one temperature; None where nothing could be compared.

    Sampled outputs, outputs of lossy rules and failures are not compared. There is no verdict either where a margin
    stands without the bound that it is judged by.

    Returns:
        ``verdict``; ``compared`` outputs, of which ``divergences`` differ and ``unexplained`` differ by more than the
        dtype explains; the ``worst`` divergence, with its ``largest_margin`` and ``tie_bound`` in nats. The margin is
        None without divergences, or where one output ends and the other goes on, which no dtype explains.
    """
    frame = frame_of(outputs)
    compared = frame[~frame.failed & frame.equals_plain.notna() & frame.exactness.map(promises_equality).astype(bool)]
    divergent = compared[~compared.equals_plain.astype(bool)]
    if compared.empty or (divergent.margin.notna() & divergent.tie_bound.isna()).any():
        return None
    listed = divergences_of(divergent)
    unexplained = sum(not explained(each) for each in listed)
    worst = max(listed, key=lambda each: (not explained(each), _margin(each)), default=None)
    differing = Verdict.NOT_LOSSLESS if unexplained else Verdict.TIES
    return Figures(
        verdict=Verdict.EQUAL if divergent.empty else differing,
        compared=len(compared),
        divergences=len(divergent),
        unexplained=unexplained,
        largest_margin=None if worst is None else worst.margin,
        tie_bound=None if worst is None else worst.tie_bound,
        worst=worst,
    )


def divergences_of(frame: Frame) -> list[Figures]:
    """Return where the outputs of a frame leave plain decoding's, as far as they do.

    Each has ``prompt``, ``turn`` and ``sample``; ``index``, the number of the output token, from 0; ``tokens`` and
    ``texts``, the method's and plain decoding's; ``margin`` and ``tie_bound`` as in ``Record``.
    """
    found = frame[frame.divergence.notna()]
    return [
        Figures(
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
    ]


def explained(divergence: Any) -> bool:
    """Whether a divergence, or the one of a record, is within what the dtype explains at its place.

    A bound of 0 explains nothing: it comes from an invariant engine, where even a margin of 0 is no excuse, because
    equal logits are decided by the token's id.
    """
    return bool(divergence.tie_bound) and _margin(divergence) <= divergence.tie_bound


def _margin(divergence: Any) -> float:
    return math.inf if divergence.margin is None else divergence.margin
