"""How long forwards take, as sums of what does and what does not depend on their size, with fitted constants.

A forward of a batch costs

    t = δ + γ · tokens + α · positions + β · pairs

seconds: δ whatever its size, such as reading the weights; γ per token of the batch; α per position that is read from
the cache, over all rows; β per pair of a query and a position that it sees. Attention that is bound by memory costs α,
which does not depend on the number of queries; attention that is bound by arithmetic costs β. It is a sum and not the
larger of several bounds: published fits of serving engines, and ours, say so.

One line over all numbers of tokens would be wrong, because other numbers of rows are multiplied by other kernels. So δ
and γ belong to a range of tokens, and are fitted range by range, while α and β are common to all.

The constants are fitted by least squares of relative errors, none of them below 0. A constant below 0 would mean that
more work takes less time. Ordinary least squares gives such constants where two sizes grow together, and predicts
negative times outside of what was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Shaped

Sizes = Shaped[np.ndarray, "*size"]
"""A number for each of several rounds."""


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
        """Return the size of a forward of ``queries`` tokens in each of some rows, behind ``context`` positions.

        The tokens of a row are the nodes of a tree, root included, or a piece of a prompt.
        """
        tokens = rows * queries
        return cls(tokens=tokens, positions=rows * context, pairs=tokens * (context + (queries + 1) / 2))


@dataclass(frozen=True, kw_only=True)
class TokenRange:
    """Forwards of up to ``upto`` tokens: seconds of any of them (``fixed``, δ) and per token (``per_token``, γ)."""

    upto: int | None
    fixed: float
    per_token: float

    def seconds(self, tokens: float) -> float:
        """Return the seconds that do not depend on the cache."""
        return self.fixed + self.per_token * tokens


def _check(ranges: Sequence[TokenRange], *more: float) -> None:
    """Refuse ranges that do not cover every number of tokens once, and constants that are no times."""
    ends = [each.upto for each in ranges]
    if not ends or ends[-1] is not None or None in ends[:-1]:
        raise ValueError(f"the ranges of a cost end at {ends}: the last one alone has no end")
    if not all(0 < low < high for low, high in pairwise(end for end in ends if end is not None)):
        raise ValueError(f"the ranges of a cost end at {ends}: give ascending numbers of tokens")
    constants = [*more, *(number for each in ranges for number in (each.fixed, each.per_token))]
    if not all(0 <= number < float("inf") for number in constants):
        raise ValueError("a constant of a cost is no number of seconds from 0 on: measure it again")


def _seconds_of(ranges: Sequence[TokenRange], tokens: Sizes) -> Sizes:
    """Return the seconds of forwards that do not depend on the cache, by their tokens."""
    if len(ranges) == 1:
        return ranges[0].fixed + ranges[0].per_token * tokens
    place = np.searchsorted([each.upto for each in ranges[:-1] if each.upto is not None], tokens)
    fixed, per_token = (np.array([getattr(each, name) for each in ranges]) for name in ("fixed", "per_token"))
    return fixed[place] + per_token[place] * tokens


def _range_of(ranges: Sequence[TokenRange], tokens: float) -> TokenRange:
    return next(each for each in ranges if each.upto is None or tokens <= each.upto)


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
        _check(self.ranges, self.per_position, self.per_pair)

    @classmethod
    def affine(cls, *, fixed: float, per_token: float, per_position: float) -> "StepCost":
        """Return a cost with one range, and attention that is bound by memory: δ + γ · tokens + α · positions."""
        ranges = (TokenRange(upto=None, fixed=fixed, per_token=per_token),)
        return cls(ranges=ranges, per_position=per_position, per_pair=0.0)

    @property
    def ends(self) -> tuple[int, ...]:
        """Where ranges end, the last one left out."""
        return tuple(each.upto for each in self.ranges if each.upto is not None)

    def seconds(self, size: StepSize) -> float:
        """Return the seconds of a forward."""
        attention = self.per_position * size.positions + self.per_pair * size.pairs
        return _range_of(self.ranges, size.tokens).seconds(size.tokens) + attention

    def each(self, *, rows: int, queries: Sizes, context: float) -> Sizes:
        """Return the seconds of forwards that differ in their tokens per row alone; see ``StepSize.of``."""
        tokens = rows * queries
        seconds = _seconds_of(self.ranges, tokens) + self.per_position * rows * context
        return seconds + self.per_pair * tokens * (context + (queries + 1) / 2) if self.per_pair else seconds


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """Seconds of a round besides the target's forward, level by level of the draft.

    A level is a call of the drafting model, or a step of the acceptance rule, for all rows together.

    Attributes:
        fixed: Seconds of any round in which it happens.
        levels: The cost of a level by its number of tokens, ascending; the last range has no upper end.
        per_position: Seconds per level and position in the cache, over all rows.
    """

    fixed: float
    levels: tuple[TokenRange, ...] = (TokenRange(upto=None, fixed=0.0, per_token=0.0),)
    per_position: float = 0.0

    def __post_init__(self) -> None:
        _check(self.levels, self.fixed, self.per_position)

    def seconds(self, *, levels: float, tokens: float, positions: float) -> float:
        """Return the seconds in one round.

        Args:
            levels: Depth of the deepest draft.
            tokens: Drafted tokens, over all rows and levels.
            positions: Positions in the cache, over all rows.
        """
        if not levels:
            return self.fixed
        each = tokens / levels
        return self.fixed + levels * (_range_of(self.levels, each).seconds(each) + self.per_position * positions)

    def each(self, *, levels: Sizes, tokens: Sizes, positions: float) -> Sizes:
        """Return the seconds in rounds that differ in levels and tokens; see ``seconds``."""
        per_level = tokens / np.maximum(levels, 1)
        return self.fixed + levels * (_seconds_of(self.levels, per_level) + self.per_position * positions)


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Absolute errors of so many predictions relative to the measurements: median, 95th percentile, the largest one."""

    median: float
    p95: float
    worst: float
    points: int

    @classmethod
    def of(cls, predicted: Sequence[float], measured: Sequence[float]) -> "Errors":
        """Return the errors of predictions.

        Raises:
            ValueError: There is none.
        """
        errors = np.array([abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)])
        if not len(errors):
            raise ValueError("there is no measured point to compare predictions with")
        median, p95 = np.quantile(errors, (0.5, 0.95))
        return cls(median=float(median), p95=float(p95), worst=float(errors.max()), points=len(errors))


def fit_step(sizes: Sequence[StepSize], seconds: Sequence[float], *, ends: Sequence[int] = ()) -> StepCost:
    """Return the constants that are closest to measured forwards.

    In a range whose forwards all have one number of tokens, the time per token cannot be told from the fixed one: all
    of it counts as fixed.

    Args:
        seconds: How long each took.
        ends: The most tokens of every range but the last one. A range that nothing was measured in is left out, and its
            forwards count to the next one (at the end, to the one before).

    Raises:
        ValueError: There are fewer steps than constants.
    """
    columns, wanted = _by_range([size.tokens for size in sizes], ends)
    columns.append(np.array([size.positions for size in sizes], dtype=float))
    columns.append(np.array([size.pairs for size in sizes], dtype=float))
    found = _fit(np.stack(columns, axis=1), seconds)
    return StepCost(ranges=_ranges(found, wanted), per_position=float(found[-2]), per_pair=float(found[-1]))


def fit_part(sizes: Sequence[Mapping[str, float]], seconds: Sequence[float], *, ends: Sequence[int] = ()) -> PartCost:
    """Return the constants that are closest to measured parts of rounds.

    Args:
        sizes: Of every round, as ``PartCost.seconds`` takes them.
        ends: The most tokens of a level of every range but the last one; see ``fit_step``.

    Raises:
        ValueError: There are fewer of them than constants.
    """
    levels, tokens, positions = (
        np.array([size[name] for size in sizes], dtype=float) for name in ("levels", "tokens", "positions")
    )
    columns, wanted = _by_range(tokens / np.maximum(levels, 1.0), ends)
    columns = [column * levels for column in columns]
    columns += [levels * positions, np.ones(len(sizes))]
    found = _fit(np.stack(columns, axis=1), seconds)
    return PartCost(fixed=float(found[-1]), levels=_ranges(found, wanted), per_position=float(found[-2]))


def _by_range(given: Sequence[float] | np.ndarray, ends: Sequence[int]) -> tuple[list[np.ndarray], list[int]]:
    """Return two columns for every range, of its fixed part and of its tokens, and the ends of the ranges."""
    tokens = np.array(given, dtype=float)
    wanted = _occupied(tokens, ends)
    number = np.digitize(tokens, wanted, right=True)
    columns: list[np.ndarray] = []
    for index in range(len(wanted) + 1):
        own = number == index
        varied = len(np.unique(tokens[own])) > 1
        columns += [np.where(own, 1.0, 0.0), np.where(own & varied, tokens, 0.0)]
    return columns, wanted


def _ranges(found: Float[np.ndarray, " term"], ends: Sequence[int]) -> tuple[TokenRange, ...]:
    return tuple(
        TokenRange(upto=end, fixed=float(found[2 * index]), per_token=float(found[2 * index + 1]))
        for index, end in enumerate((*ends, None))
    )


def _occupied(tokens: np.ndarray, ends: Sequence[int]) -> list[int]:
    """Return the ends of those ranges that hold a measured number of tokens, but for the last one."""
    kept: list[int] = []
    begin = 0
    for end in sorted(ends):
        if ((tokens > begin) & (tokens <= end)).any() and (tokens > end).any():
            kept.append(end)
            begin = end
    return kept


def _fit(columns: Float[np.ndarray, "point term"], seconds: Sequence[float]) -> Float[np.ndarray, " term"]:
    measured = np.array(seconds, dtype=float)
    used = int((np.abs(columns).sum(0) > 0).sum()) if len(measured) else 1
    if len(measured) < used:
        raise ValueError(f"{len(measured)} measured times do not determine {used} constants: measure more sizes")
    if not (measured > 0).all():
        raise ValueError("a measured time is not above 0: measure again")
    from scipy.optimize import nnls  # plans, which fit nothing, do without

    weighted = columns / measured[:, None]
    # Terms differ by many orders of magnitude, which the solver's tolerance does not know.
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    return nnls(weighted / scale, np.ones(len(measured)))[0] / scale
