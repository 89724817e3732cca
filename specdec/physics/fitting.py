"""Fits the constants of step costs to measured times: least squares of relative errors, and no constant below 0.

A constant below 0 would mean that more work takes less time. Ordinary least squares gives such constants where two
sizes grow together, and predicts negative times outside of what was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.optimize import nnls

from specdec.physics.step_cost import PartCost, StepCost, StepSize, TokenRange


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """A forward that was timed.

    Attributes:
        size: Its size.
        seconds: How long it took.
    """

    size: StepSize
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TimedPart:
    """A part of rounds that was timed.

    Attributes:
        levels: See ``PartCost.seconds``.
        tokens: See ``PartCost.seconds``.
        positions: See ``PartCost.seconds``.
        seconds: How long it took.
    """

    levels: int
    tokens: int
    positions: float
    seconds: float


def fit_step(steps: Sequence[TimedStep], *, ends: Sequence[int] = ()) -> StepCost:
    """Returns the constants that are closest to measured forwards.

    In a range whose forwards all have one number of tokens, the time per token cannot be told from the fixed one: all
    of it counts as fixed.

    Args:
        steps: What was measured.
        ends: The most tokens of every range but the last one. A range that nothing was measured in is left out, and its
            forwards count to the next one (at the end, to the one before).

    Raises:
        ValueError: There are fewer steps than constants.
    """
    columns, wanted = _by_range([step.size.tokens for step in steps], ends)
    columns.append(np.array([step.size.positions for step in steps], dtype=float))
    columns.append(np.array([step.size.pairs for step in steps], dtype=float))
    found = _fit(np.stack(columns, axis=1), [step.seconds for step in steps])
    return StepCost(ranges=_ranges(found, wanted), per_position=float(found[-2]), per_pair=float(found[-1]))


def fit_part(parts: Sequence[TimedPart], *, ends: Sequence[int] = ()) -> PartCost:
    """Returns the constants that are closest to measured parts of rounds.

    Args:
        parts: What was measured.
        ends: The most tokens of a level of every range but the last one; see ``fit_step``.

    Raises:
        ValueError: There are fewer of them than constants.
    """
    levels = np.array([part.levels for part in parts], dtype=float)
    tokens = np.array([part.tokens for part in parts], dtype=float)
    columns, wanted = _by_range(tokens / np.maximum(levels, 1.0), ends)
    columns = [column * levels for column in columns]
    columns.append(levels * np.array([part.positions for part in parts], dtype=float))
    columns.append(np.ones(len(parts)))
    found = _fit(np.stack(columns, axis=1), [part.seconds for part in parts])
    return PartCost(fixed=float(found[-1]), levels=_ranges(found, wanted), per_position=float(found[-2]))


def _by_range(given: Sequence[float] | np.ndarray, ends: Sequence[int]) -> tuple[list[np.ndarray], list[int]]:
    """Returns two columns for every range, of its fixed part and of its tokens, and the ends of the ranges."""
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
    """Returns the ends of those ranges that hold a measured number of tokens, but for the last one."""
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
    weighted = columns / measured[:, None]
    # Terms differ by many orders of magnitude, which the solver's tolerance does not know.
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    return nnls(weighted / scale, np.ones(len(measured)))[0] / scale
