"""How long forwards take: sums of what does and what does not depend on their size, with fitted constants.

    t = δ + γ · tokens + α · positions + β · pairs

seconds for a batch: δ whatever its size; γ per token; α per position that is read from the cache, over all rows
(attention bound by memory); β per pair of a query and a position that it sees (attention bound by arithmetic). It is a
sum and not the larger of several bounds: published fits of serving engines, and ours, say so. Other numbers of rows are
multiplied by other kernels, so δ and γ belong to a range of tokens; α and β are common to all. Constants are fitted by
least squares of relative errors, none below 0: ordinary ones are negative where two sizes grow together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from specdec.physics.work import CACHES, TOLERANCE, Roof, Work

Sizes = Shaped[np.ndarray, "*size"]
"""A number for each of several rounds."""


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """Quantities that a forward's time depends on, over all rows: numbers, or arrays of them for several forwards."""

    tokens: Any
    positions: Any
    pairs: Any

    @classmethod
    def of(cls, *, rows: Any, queries: Any, context: Any) -> "StepSize":
        """Return the size of a forward of ``queries`` tokens in each of some rows, behind ``context`` positions."""
        tokens = rows * queries
        return cls(tokens=tokens, positions=rows * context, pairs=tokens * (context + (queries + 1) / 2))


@dataclass(frozen=True, kw_only=True)
class TokenRange:
    """Forwards of up to ``upto`` tokens: seconds of any of them (``fixed``, δ) and per token (``per_token``, γ)."""

    upto: int | None
    fixed: float
    per_token: float


def _check(ranges: Sequence[TokenRange], *more: float) -> None:
    ends = [range_.upto for range_ in ranges]
    if not ends or ends[-1] is not None or None in ends[:-1]:
        raise ValueError(f"the ranges of a cost end at {ends}: the last one alone has no end")
    if not all(0 < low < high for low, high in pairwise(end for end in ends if end is not None)):
        raise ValueError(f"the ranges of a cost end at {ends}: give ascending numbers of tokens")
    constants = [*more, *(number for range_ in ranges for number in (range_.fixed, range_.per_token))]
    if not all(0 <= number < float("inf") for number in constants):
        raise ValueError("a constant of a cost is no number of seconds from 0 on: measure it again")


def _seconds_of(ranges: Sequence[TokenRange], tokens: Any) -> Any:
    if len(ranges) == 1:
        return ranges[0].fixed + ranges[0].per_token * tokens
    place = np.searchsorted([range_.upto for range_ in ranges[:-1] if range_.upto is not None], tokens)
    fixed, per_token = (np.array([getattr(range_, name) for range_ in ranges]) for name in ("fixed", "per_token"))
    return fixed[place] + per_token[place] * tokens


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of a forward by its size: ranges of tokens, ascending, the last without an end; α and β (see above)."""

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

    def seconds(self, size: StepSize) -> Any:
        return _seconds_of(self.ranges, size.tokens) + self.per_position * size.positions + self.per_pair * size.pairs


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """Seconds of a round besides the target's forward, level by level of the draft.

    A level is a call of the drafting model, or a step of the acceptance rule, for all rows together. Its cost
    (``levels``) is by its number of tokens; ``per_position`` is per level and position in the cache, over all rows.
    """

    fixed: float
    levels: tuple[TokenRange, ...] = (TokenRange(upto=None, fixed=0.0, per_token=0.0),)
    per_position: float = 0.0

    def __post_init__(self) -> None:
        _check(self.levels, self.fixed, self.per_position)

    def seconds(self, *, levels: Any, tokens: Any, positions: float) -> Any:
        """Return the seconds of rounds by the depth of the deepest draft, tokens and positions over all rows."""
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
        """Return the errors of predictions. Raises ValueError: there is none."""
        errors = np.array([abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)])
        if not len(errors):
            raise ValueError("there is no measured point to compare predictions with")
        median, p95 = np.quantile(errors, (0.5, 0.95))
        return cls(median=float(median), p95=float(p95), worst=float(errors.max()), points=len(errors))


# ---------------------------------------------------------------- fits


def fit_step(sizes: Sequence[StepSize], seconds: Sequence[float], *, ends: Sequence[int] = ()) -> StepCost:
    """Return the constants that are closest to measured forwards.

    ``ends`` are the most tokens of every range but the last one. Where all forwards of a range have one number of
    tokens, all of their time counts as fixed; a range that nothing was measured in is left out.

    Raises ValueError: there are fewer steps than constants.
    """
    columns, kept = _by_range(np.array([size.tokens for size in sizes], dtype=float), ends)
    columns += [np.array([getattr(size, name) for size in sizes], dtype=float) for name in ("positions", "pairs")]
    constants = _fit(np.stack(columns, axis=1), seconds)
    return StepCost(ranges=_ranges(constants, kept), per_position=float(constants[-2]), per_pair=float(constants[-1]))


def fit_part(sizes: Sequence[Mapping[str, float]], seconds: Sequence[float], *, ends: Sequence[int] = ()) -> PartCost:
    """Return the constants that are closest to measured parts of rounds, with sizes as ``PartCost`` takes them."""
    levels, tokens, positions = (
        np.array([size[name] for size in sizes], dtype=float) for name in ("levels", "tokens", "positions")
    )
    columns, kept = _by_range(tokens / np.maximum(levels, 1.0), ends)
    columns = [*(column * levels for column in columns), levels * positions, np.ones(len(sizes))]
    constants = _fit(np.stack(columns, axis=1), seconds)
    return PartCost(fixed=float(constants[-1]), levels=_ranges(constants, kept), per_position=float(constants[-2]))


def _by_range(tokens: np.ndarray, ends: Sequence[int]) -> tuple[list[np.ndarray], list[int]]:
    """Return two columns for every range, of its fixed part and of its tokens; and the ends of those with points."""
    kept: list[int] = []
    for end in sorted(ends):
        if ((tokens > max(kept, default=0)) & (tokens <= end)).any() and (tokens > end).any():
            kept.append(end)
    number = np.digitize(tokens, kept, right=True)
    columns: list[np.ndarray] = []
    for index in range(len(kept) + 1):
        inside = number == index
        varied = len(np.unique(tokens[inside])) > 1
        columns += [np.where(inside, 1.0, 0.0), np.where(inside & varied, tokens, 0.0)]
    return columns, kept


def _ranges(constants: Float[np.ndarray, " term"], ends: Sequence[int]) -> tuple[TokenRange, ...]:
    return tuple(
        TokenRange(upto=end, fixed=float(constants[2 * index]), per_token=float(constants[2 * index + 1]))
        for index, end in enumerate((*ends, None))
    )


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


# ---------------------------------------------------------------- are fitted constants possible at all?


@dataclass(frozen=True, kw_only=True)
class LeastWork:
    """The least work of a model's forwards: weights that any reads, keys and values per position, operations."""

    weight_bytes: float
    kv_bytes: float
    token_flops: float
    pair_flops: float

    def of(self, size: StepSize) -> Work:
        moved = self.weight_bytes + self.kv_bytes * size.positions
        return Work(moved, self.token_flops * size.tokens + self.pair_flops * size.pairs)


def check_possible(
    cost: StepCost, sizes: Sequence[StepSize], least: LeastWork, roof: Roof, *, cache_bytes: float
) -> None:
    """Refuse predicted times that are faster than physics, but for work that the caches may hold."""
    for size in sizes:
        work = least.of(size)
        bound, seconds = roof.least_seconds(work), cost.seconds(size)
        in_caches = work.intensity < roof.ridge and work.bytes < CACHES * cache_bytes
        if not in_caches and seconds < bound * (1 - TOLERANCE):
            raise ValueError(
                f"the target's forward of {size.tokens:g} tokens behind {size.positions:g} positions would take "
                f"{seconds:.3g} s, and at least {bound:.3g} s are needed: that is faster than physics, so that times "
                f"or peaks are wrong; measure again on an idle machine"
            )
