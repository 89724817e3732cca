"""How long forwards take, as sums of what does and what does not depend on their size, with fitted constants.

A forward of a batch costs

    t = δ + γ · tokens + α · positions + β · pairs

seconds: δ whatever its size, such as reading the weights; γ per token of the batch; α per position that is read from
the cache, over all rows; β per pair of a query and a position that it sees. Attention that is bound by memory costs α,
which does not depend on the number of queries; attention that is bound by arithmetic costs β. It is a sum and not the
larger of several bounds: published fits of serving engines, and ours, say so.

One line over all numbers of tokens would be wrong, because other numbers of rows are multiplied by other kernels. So δ
and γ belong to a range of tokens, and are fitted range by range, while α and β are common to all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """What the time of a forward depends on.

    Attributes:
        tokens: Tokens of the batch, padding included.
        positions: Positions that are read from the cache, over all rows.
        pairs: Pairs of a query and a position that it sees, over all rows.
    """

    tokens: float
    positions: float
    pairs: float

    @classmethod
    def of(cls, *, rows: float, queries: float, context: float) -> "StepSize":
        """Returns the size of a forward of ``queries`` tokens in each of some rows, behind ``context`` positions.

        Args:
            rows: Rows of the batch.
            queries: Tokens per row: the nodes of a tree, root included, or a piece of a prompt.
            context: Positions in a row's cache, on average.
        """
        tokens = rows * queries
        return cls(tokens=tokens, positions=rows * context, pairs=tokens * (context + (queries + 1) / 2))


@dataclass(frozen=True, kw_only=True)
class TokenRange:
    """What forwards of some numbers of tokens have in common.

    Attributes:
        upto: The most tokens; None for the last range.
        fixed: Seconds of any of them (δ).
        per_token: Seconds per token (γ).
    """

    upto: int | None
    fixed: float
    per_token: float


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of a forward by its size.

    Attributes:
        ranges: By number of tokens, ascending; the last one has no upper end.
        per_position: Seconds per position that is read (α).
        per_pair: Seconds per pair of a query and a position (β).
    """

    ranges: tuple[TokenRange, ...]
    per_position: float
    per_pair: float

    def __post_init__(self) -> None:
        ends = [each.upto for each in self.ranges]
        if not ends or ends[-1] is not None or None in ends[:-1]:
            raise ValueError(f"the ranges of a step's cost end at {ends}: the last one alone has no end")
        if not all(0 < low < high for low, high in pairwise(end for end in ends if end is not None)):
            raise ValueError(f"the ranges of a step's cost end at {ends}: give ascending numbers of tokens")
        numbers = [number for each in self.ranges for number in (each.fixed, each.per_token)]
        if not all(0 <= number < float("inf") for number in (*numbers, self.per_position, self.per_pair)):
            raise ValueError("a constant of a step's cost is no number of seconds from 0 on: measure it again")

    @property
    def ends(self) -> tuple[int, ...]:
        """Where ranges end, the last one left out."""
        return tuple(each.upto for each in self.ranges if each.upto is not None)

    def range_of(self, tokens: float) -> TokenRange:
        """Returns the range that a number of tokens is in."""
        return next(each for each in self.ranges if each.upto is None or tokens <= each.upto)

    def seconds(self, size: StepSize) -> float:
        """Returns the seconds of a forward."""
        own = self.range_of(size.tokens)
        attention = self.per_position * size.positions + self.per_pair * size.pairs
        return own.fixed + own.per_token * size.tokens + attention


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """Seconds of what a round does besides the target's forward, such as drafting.

    Attributes:
        fixed: Seconds of any round in which it happens.
        per_level: Seconds per level of the draft: a call of the drafting model, a step of the acceptance rule.
        per_token: Seconds per drafted token, over all rows.
        per_position: Seconds per level and position in the cache, over all rows.
    """

    fixed: float
    per_level: float = 0.0
    per_token: float = 0.0
    per_position: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.fixed, self.per_level, self.per_token, self.per_position)
        if not all(0 <= number < float("inf") for number in numbers):
            raise ValueError("a constant of a round's cost is no number of seconds from 0 on: measure it again")

    def seconds(self, *, levels: float, tokens: float, positions: float) -> float:
        """Returns the seconds in one round.

        Args:
            levels: Depth of the deepest draft.
            tokens: Drafted tokens, over all rows.
            positions: Positions in the cache, over all rows.
        """
        per_level = self.per_level + self.per_position * positions
        return self.fixed + per_level * levels + self.per_token * tokens


@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far predictions are from what was measured, relative to it.

    Attributes:
        median: The median of the absolute relative errors.
        p95: Their 95th percentile.
        worst: The largest one.
        points: How many points there were.
    """

    median: float
    p95: float
    worst: float
    points: int

    @classmethod
    def of(cls, predicted: Sequence[float], measured: Sequence[float]) -> "Errors":
        """Returns the errors of predictions.

        Raises:
            ValueError: There is none.
        """
        errors = sorted(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))
        if not errors:
            raise ValueError("there is no measured point to compare predictions with")
        return cls(median=_quantile(errors, 0.5), p95=_quantile(errors, 0.95), worst=errors[-1], points=len(errors))


def _quantile(ascending: Sequence[float], share: float) -> float:
    place = share * (len(ascending) - 1)
    low = int(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (place - low) * (ascending[high] - ascending[low])
