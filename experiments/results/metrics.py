"""The figures of rounds: functions of a frame with a row for every round.

The columns are those of the engine's ``Step``: ``accepted``, ``expected_accepted``, ``proposed_depth`` and
``proposed_nodes``. The rounds of a run's records are ``frame.rounds_of``, those of the engine's steps ``of_steps``. A
figure that has nothing to be computed from is None.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas

from experiments.results.frame import Frame
from experiments.results.statistics import Bootstrap, Interval

if TYPE_CHECKING:
    from specdec.types import Step  # for types only: results are read where specdec and torch are not installed

COLUMNS = ("accepted", "expected_accepted", "proposed_depth", "proposed_nodes")


def decided(steps: "Iterable[Step]") -> "list[Step]":
    """Return the rounds that count: all but those that went wrong and decided nothing."""
    return [step for step in steps if step.error is None and step.finish_reason != "error"]


def of_steps(steps: "Iterable[Step]") -> Frame:
    """Return the frame of the engine's rounds, without those that decided nothing."""
    return pandas.DataFrame([[getattr(step, name) for name in COLUMNS] for step in decided(steps)], columns=COLUMNS)


def mean_acceptance_length(rounds: Frame) -> float | None:
    """Emitted tokens per round before any cut, the recovered or bonus token included; plain decoding has 1.

    Three rounds that accept 2, 0 and 1 drafted tokens emit 3 + 1 + 2 tokens: the mean is 2.
    """
    return 1 + float(rounds.accepted.sum() / len(rounds)) if len(rounds) else None


def expected_mean_acceptance_length(rounds: Frame) -> float | None:
    """The mean acceptance length with every round's expected accepted tokens, given its draft, in place of the drawn.

    It has less sampling noise than ``mean_acceptance_length`` and the same expectation. None also for an engine that
    does not say what it drafted (its rounds accept more than they proposed).
    """
    known = len(rounds) and (rounds.accepted <= rounds.proposed_depth).all()
    return 1 + float(rounds.expected_accepted.sum() / len(rounds)) if known else None


def draft_acceptance_rate(rounds: Frame) -> float | None:
    """Accepted tokens over proposed depth (of the longest branch); None if nothing was proposed."""
    depth = rounds.proposed_depth.sum()
    return float(rounds.accepted.sum() / depth) if depth else None


def proposed_per_round(proposed: "pandas.Series") -> float | None:
    """Mean of ``proposed_depth`` or ``proposed_nodes``; None if nothing was proposed."""
    return float(proposed.mean()) or None if len(proposed) else None


def acceptance_by_position(rounds: Frame, bootstrap: Bootstrap | None = None) -> dict[str, float | None]:
    """Acceptance at positions 1, 2, … of the draft, as far as any round proposed.

    Rounds (depth 2, accepted 2), (depth 2, accepted 0), (depth 1, accepted 1): position 1 was accepted in 2 of 3,
    position 2 in 1 of 2; of the rounds that proposed it, only the first had accepted position 1: conditionally 1 of 1.

    Args:
        rounds: With the column ``prompt`` where intervals are wanted.

    Returns:
        ``acceptance_at.i``: rounds that accepted at least i tokens, over rounds that proposed a depth of at least i;
        ``conditional_acceptance_at.i``: the same among rounds that accepted at least i-1 tokens, None where there is no
        such round; ``rounds_at.i``: rounds that proposed a depth of at least i; and the ends of the intervals
        (``acceptance_low_at.i``), None where too few prompts have any.
    """
    depth, accepted = (rounds[name].to_numpy()[:, None] for name in ("proposed_depth", "accepted"))
    places = np.arange(1, 1 + (int(depth.max()) if len(rounds) else 0))
    drafted = depth >= places
    counts = np.concatenate([drafted, drafted & (accepted >= places - 1), drafted & (accepted >= places)], axis=1)

    def shares(sums: np.ndarray) -> np.ndarray:
        of_all, reached, kept = np.split(sums.astype(np.float64).T, 3)
        unknown = np.full_like(kept, np.nan)
        return np.concatenate([np.divide(kept, base, out=unknown.copy(), where=base > 0) for base in (of_all, reached)])

    values = shares(counts.sum(0, keepdims=True))[:, 0]
    bounds: Sequence[Interval | None] | None = None
    if bootstrap is not None and len(places):
        by_prompt: Frame = pandas.DataFrame(counts).groupby(rounds.prompt.to_numpy(), sort=False).sum()
        bounds = bootstrap.over_tables(shares, by_prompt.to_numpy())
    by_position: dict[str, float | None] = {}
    for number, value in enumerate(values):
        kind, place = ("" if number < len(places) else "conditional_"), number % len(places) + 1
        low, high = bounds[number] or (None, None) if bounds else (None, None)
        by_position[f"{kind}acceptance_at.{place}"] = None if np.isnan(value) else float(value)
        by_position |= {f"{kind}acceptance_low_at.{place}": low, f"{kind}acceptance_high_at.{place}": high}
    drafted_this_far = counts[:, : len(places)].sum(0).tolist()
    return by_position | {f"rounds_at.{place}": count for place, count in enumerate(drafted_this_far, start=1)}


def stage_seconds(steps: "Iterable[Step]") -> dict[str, float]:
    """Seconds of each stage, in all rounds together.

    Rows that shared a round carry one and the same ``seconds`` mapping, and it is counted once.
    """
    # Keyed by identity: the steps keep the mappings alive, and two rounds may well take equally long.
    mappings = {id(step.seconds): step.seconds for step in steps}
    return pandas.DataFrame(list(mappings.values())).sum().to_dict()


def distinct_n_gram_rate(token_ids: Sequence[int], n: int = 4) -> float | None:
    """Distinct n-grams over all n-grams of one output: low where it loops. None if it is shorter than n.

    ``1 2 1 2 1`` has the 2-grams 12 21 12 21: the rate is 2/4.
    """
    grams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None
