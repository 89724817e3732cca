"""Where each token of an output came from: accepted from the draft, or drawn by the rule after it."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from experiments.results.records import Record


class Source(StrEnum):
    """How a token of the output came about."""

    ACCEPTED = "accepted"
    """It was drafted, and the rule kept it."""
    RECOVERED = "recovered"
    """It was drawn after a rejection."""
    BONUS = "bonus"
    """It was drawn from p after everything on its branch was accepted."""
    EITHER = "recovered or bonus"
    """One of these two: a record of a tree does not tell whether the accepted branch went on; a trace does."""
    TARGET = "target"
    """Nothing was drafted in its round: it was drawn from p, as in plain decoding."""


class SourcedToken(NamedTuple):
    """A token of an output, and the number of the round that emitted it, from 0.

    Its depth is its place in the round, from 1: an accepted token's depth in the draft tree.
    """

    token: int
    round: int
    depth: int
    source: Source


def sourced(record: Record, at_leaf: Sequence[bool] = ()) -> list[SourcedToken]:
    """The tokens of an output, each with its source.

    A round emits its accepted tokens and one more; the last round's may be cut. ``at_leaf`` says whether each round's
    accepted path ended at a leaf of its tree, where a trace tells.
    """
    found: list[SourcedToken] = []
    left = iter(record.token_ids)
    columns = zip(record.accepted, record.proposed_depth, record.proposed_nodes, strict=True)
    for number, (accepted, depth, nodes) in enumerate(columns):
        leaf = at_leaf[number] if at_leaf else None
        for place in range(1, accepted + 2):
            token = next(left, None)
            if token is None:
                return found
            source = Source.ACCEPTED if place <= accepted else _after(accepted, depth, nodes, leaf)
            found.append(SourcedToken(token, number, place, source))
    return found


def _after(accepted: int, depth: int, nodes: int, leaf: bool | None) -> Source:
    """The source of the token that ends a round."""
    if nodes == 0:
        return Source.TARGET
    if leaf is not None:
        return Source.BONUS if leaf else Source.RECOVERED
    if accepted == depth:  # the longest branch: it cannot go on
        return Source.BONUS
    return Source.RECOVERED if nodes == depth else Source.EITHER  # a chain has as many nodes as its depth
