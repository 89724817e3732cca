"""The verdict on an exact rule at temperature 0: is the output plain decoding's, token for token?"""

import math
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from experiments.results.frame import Frame, Outputs, frame_of
from experiments.results.records import DECLARED, EXACT, OTHERWISE
from experiments.results.rows import without_missing

if TYPE_CHECKING:
    from specdec.interfaces import Verifier

OTHER_TARGET = "another target"
"""The word for plain decoding with other weights or another cache than the run's own plain decoding."""
THERE = f" for {OTHER_TARGET}"
"""Stands behind what a rule promises on such a target."""
NOT_LOSSLESS = "NOT LOSSLESS"
"""The verdict that no table, picture or exit code may hide."""


def stated_exactness(rule: "Verifier") -> str:
    """The word of results for a rule: its promise; an exact one is declared unless it ships, and so is tested."""
    promise, kind = str(rule.exactness.value), type(rule)
    package = sys.modules.get("verifiers")  # a rule of it was imported from it
    ships = kind.__name__ in getattr(package, "__all__", ()) and getattr(package, kind.__name__, None) is kind
    return DECLARED if promise == EXACT and not ships else promise


def promises_exact(exactness: str | None) -> bool:
    """Whether a rule promises the target's own distribution, tested or not."""
    return exactness in (EXACT, DECLARED, OTHERWISE)


def promises_equality(exactness: str | None) -> bool:
    """Whether greedy outputs have to equal plain decoding's on the same target, which may be another one."""
    return exactness not in (None, OTHERWISE) and promises_exact(str(exactness).removesuffix(THERE))


class Verdict(StrEnum):
    """The outcome of a comparison of greedy outputs with plain decoding's.

    ``TIES``: some differ, each from a place on where the dtype cannot tell the two tokens apart. ``NOT_LOSSLESS``: some
    differ by more than the dtype explains, so the method is broken.
    """

    EQUAL = "equal"
    TIES = "ties"
    NOT_LOSSLESS = "not lossless"


def judge(outputs: Outputs) -> dict[str, Any] | None:
    """The verdict over one method's outputs at one temperature; None where nothing could be compared.

    Sampled outputs, outputs of lossy rules and failures are not compared. There is no verdict either where a margin
    stands without the bound that it is judged by. ``largest_margin`` and ``tie_bound`` are the worst one's, in nats;
    the margin is None without divergences, or where one output ends and the other goes on, which no dtype explains.
    """
    compared = _judged(outputs)
    divergent, furthest = divergences_of(compared), worst(outputs)
    if compared.empty or any(each.margin is not None and each.tie_bound is None for each in divergent):
        return None
    unexplained = sum(not explained(each) for each in divergent)
    differing = Verdict.NOT_LOSSLESS if unexplained else Verdict.TIES
    return {
        "lossless": str(differing if divergent else Verdict.EQUAL),
        "divergences": len(divergent),
        "unexplained": unexplained,
        "largest_margin": furthest and furthest.margin,
        "tie_bound": furthest and furthest.tie_bound,
    }


def _judged(outputs: Outputs) -> Frame:
    """The outputs that a verdict is over."""
    frame = frame_of(outputs)
    return frame[~frame.failed & frame.equals_plain.notna() & frame.exactness.map(promises_equality).astype(bool)]


@dataclass(frozen=True)
class Divergence:
    """The first place where an output leaves plain decoding's, of which ``tokens`` and ``texts`` have both.

    ``index`` is the number of the output token, from 0; ``margin`` and ``tie_bound`` as in ``Record``.
    """

    prompt: str
    turn: int
    sample: int
    index: int
    tokens: tuple[int | None, ...]
    texts: tuple[str | None, ...]
    margin: float | None
    tie_bound: float | None


def worst(outputs: Outputs) -> Divergence | None:
    """The divergence that is furthest from a tie; None where all outputs are equal."""
    parted = divergences_of(_judged(outputs))
    return max(parted, key=lambda each: (not explained(each), _margin(each)), default=None)


def divergences_of(frame: Frame) -> list[Divergence]:
    """Return where the outputs of a frame leave plain decoding's."""
    parted = frame[frame.divergence.notna()].assign(divergence=lambda rows: rows.divergence.astype(int))
    names = ("prompt", "turn", "sample", "divergence", "tokens_at_divergence", "texts_at_divergence")
    rows = without_missing(parted[[*names, "margin", "tie_bound"]])
    return [Divergence(*row) for row in rows.itertuples(index=False)]


def explained(divergence: Any) -> bool:
    """Whether a divergence, or the one of a record, is within what the dtype explains at its place.

    A bound of 0 explains nothing: it comes from an invariant engine, where even a margin of 0 is no excuse, because
    equal logits are decided by the token's id.
    """
    return bool(divergence.tie_bound) and _margin(divergence) <= divergence.tie_bound


def _margin(divergence: Any) -> float:
    return math.inf if divergence.margin is None else divergence.margin
