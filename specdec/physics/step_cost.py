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

from collections.abc import Iterable, Sequence
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

    def seconds(self, tokens: float) -> float:
        """Returns what does not depend on the cache."""
        return self.fixed + self.per_token * tokens


def check_ranges(ranges: Sequence[TokenRange]) -> None:
    """Refuse ranges that do not cover every number of tokens once.

    Raises:
        ValueError: Names what they are.
    """
    ends = [each.upto for each in ranges]
    if not ends or ends[-1] is not None or None in ends[:-1]:
        raise ValueError(f"the ranges of a cost end at {ends}: the last one alone has no end")
    if not all(0 < low < high for low, high in pairwise(end for end in ends if end is not None)):
        raise ValueError(f"the ranges of a cost end at {ends}: give ascending numbers of tokens")


def range_of(ranges: Sequence[TokenRange], tokens: float) -> TokenRange:
    """Returns the range that a number of tokens is in."""
    return next(each for each in ranges if each.upto is None or tokens <= each.upto)


def check_seconds(numbers: Iterable[float]) -> None:
    """Refuse constants that are no times.

    Raises:
        ValueError: There is one.
    """
    if not all(0 <= number < float("inf") for number in numbers):
        raise ValueError("a constant of a cost is no number of seconds from 0 on: measure it again")


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
        check_ranges(self.ranges)
        numbers = [number for each in self.ranges for number in (each.fixed, each.per_token)]
        check_seconds([*numbers, self.per_position, self.per_pair])

    @property
    def ends(self) -> tuple[int, ...]:
        """Where ranges end, the last one left out."""
        return tuple(each.upto for each in self.ranges if each.upto is not None)

    def seconds(self, size: StepSize) -> float:
        """Returns the seconds of a forward."""
        attention = self.per_position * size.positions + self.per_pair * size.pairs
        return range_of(self.ranges, size.tokens).seconds(size.tokens) + attention


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """Seconds of what a round does besides the target's forward, level by level of the draft.

    A level is a call of the drafting model, or a step of the acceptance rule, for all rows together.

    Attributes:
        fixed: Seconds of any round in which it happens.
        levels: What a level costs by its number of tokens, ascending; the last range has no upper end.
        per_position: Seconds per level and position in the cache, over all rows.
    """

    fixed: float
    levels: tuple[TokenRange, ...] = (TokenRange(upto=None, fixed=0.0, per_token=0.0),)
    per_position: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self.levels)
        numbers = [number for each in self.levels for number in (each.fixed, each.per_token)]
        check_seconds([self.fixed, *numbers, self.per_position])

    def seconds(self, *, levels: float, tokens: float, positions: float) -> float:
        """Returns the seconds in one round.

        Args:
            levels: Depth of the deepest draft.
            tokens: Drafted tokens, over all rows and levels.
            positions: Positions in the cache, over all rows.
        """
        if not levels:
            return self.fixed
        each = tokens / levels
        return self.fixed + levels * (range_of(self.levels, each).seconds(each) + self.per_position * positions)


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
