"""The figures of rounds: functions of a frame with a row for every round.

The columns are those of the engine's ``Step``: ``accepted``, ``expected_accepted``, ``proposed_depth`` and
``proposed_nodes``. The rounds of a run's records are ``frame.rounds_of``, those of the engine's steps ``of_steps``. A
figure that has nothing to be computed from is None.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pandas

from experiments.results.frame import Frame

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


def acceptance_by_position(rounds: Frame) -> dict[str, float | None]:
    """Acceptance at positions 1, 2, … of the draft, as far as any round proposed.

    Rounds (depth 2, accepted 2), (depth 2, accepted 0), (depth 1, accepted 1): position 1 was accepted in 2 of 3,
    position 2 in 1 of 2; of the rounds that proposed it, only the first had accepted position 1: conditionally 1 of 1.

    Returns:
        ``rounds_at.i``: rounds that proposed a depth of at least i; ``acceptance_at.i``: the share of these that
        accepted at least i tokens; ``conditional_acceptance_at.i``: the same among those that accepted at least i-1,
        None where there is no such round.
    """
    by_position: dict[str, float | None] = {}
    for place in range(1, 1 + (int(rounds.proposed_depth.max()) if len(rounds) else 0)):
        accepted = rounds.accepted[rounds.proposed_depth >= place]
        before, kept = int((accepted >= place - 1).sum()), int((accepted >= place).sum())
        by_position[f"acceptance_at.{place}"] = kept / len(accepted)
        by_position[f"conditional_acceptance_at.{place}"] = kept / before if before else None
        by_position[f"rounds_at.{place}"] = len(accepted)
    return by_position


def stage_seconds(steps: "Iterable[Step]") -> dict[str, float]:
    """Seconds of each stage, in all rounds together; the mapping that rows of a round share is counted once."""
    # Keyed by identity: the steps keep the mappings alive, and two rounds may well take equally long.
    mappings = {id(step.seconds): step.seconds for step in steps}
    return pandas.DataFrame(list(mappings.values())).sum().to_dict()


def distinct_n_gram_rate(token_ids: Sequence[int], n: int = 4) -> float | None:
    """Distinct n-grams over all n-grams of one output: low where it loops. None if it is shorter than n.

    ``1 2 1 2 1`` has the 2-grams 12 21 12 21: the rate is 2/4.
    """
    grams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None
