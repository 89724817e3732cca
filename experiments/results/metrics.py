"""The figures of a run: pure functions over rounds and tokens.

A round is a ``Step`` of the engine, or what a record keeps of one. Rounds that ended in an error decided nothing and
are left out. A figure that has nothing to be computed from is None.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from specdec.types import Step  # for types only: results are read where specdec and torch are not installed


class Round(Protocol):
    """What the figures need to know of a round; the fields mean what they mean in ``Step``."""

    @property
    def accepted(self) -> int: ...

    @property
    def expected_accepted(self) -> float: ...

    @property
    def proposed_depth(self) -> int: ...

    @property
    def proposed_nodes(self) -> int: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def error(self) -> str | None: ...


AnyRound = TypeVar("AnyRound", bound=Round)


def total_tokens(steps: "Iterable[Step]") -> int:
    """Tokens of the output: cut at EOS, a stop and the length, alike for every method."""
    return sum(len(step.token_ids) for step in steps)


def mean_acceptance_length(steps: Iterable[Round]) -> float | None:
    """Emitted tokens per round before any cut, the recovered or bonus token included; plain decoding has 1.

    Three rounds that accept 2, 0 and 1 drafted tokens emit 3 + 1 + 2 tokens: the mean is 2.
    """
    rounds = decided(steps)
    return 1 + sum(step.accepted for step in rounds) / len(rounds) if rounds else None


def expected_mean_acceptance_length(steps: Iterable[Round]) -> float | None:
    """The mean acceptance length with every round's expected accepted tokens, given its draft, in place of the drawn.

    It has less sampling noise than ``mean_acceptance_length`` and the same expectation. None also for an engine that
    does not say what it drafted (its rounds accept more than they proposed).
    """
    rounds = decided(steps)
    known = bool(rounds) and all(step.accepted <= step.proposed_depth for step in rounds)
    return 1 + sum(step.expected_accepted for step in rounds) / len(rounds) if known else None


def draft_acceptance_rate(steps: Iterable[Round]) -> float | None:
    """Accepted tokens over proposed depth (of the longest branch); None if nothing was proposed."""
    rounds = decided(steps)
    depth = sum(step.proposed_depth for step in rounds)
    return sum(step.accepted for step in rounds) / depth if depth else None


def proposed_depth_per_round(steps: Iterable[Round]) -> float | None:
    """Mean depth of the longest drafted branch; None if nothing was proposed."""
    rounds = decided(steps)
    return sum(step.proposed_depth for step in rounds) / len(rounds) or None if rounds else None


def proposed_nodes_per_round(steps: Iterable[Round]) -> float | None:
    """Mean number of drafted nodes that were verified, root not counted; None if nothing was proposed."""
    rounds = decided(steps)
    return sum(step.proposed_nodes for step in rounds) / len(rounds) or None if rounds else None


@dataclass(frozen=True, kw_only=True)
class AcceptanceByPosition:
    """Acceptance at positions 1, 2, … of the draft; entry 0 is position 1.

    Attributes:
        unconditional: Rounds that accepted at least i tokens, over rounds that proposed a depth of at least i.
        conditional: The same among rounds that accepted at least i-1 tokens; None where there is no such round.
        rounds: Rounds that proposed a depth of at least i.
    """

    unconditional: tuple[float, ...]
    conditional: tuple[float | None, ...]
    rounds: tuple[int, ...]


def acceptance_by_position(steps: Iterable[Round]) -> AcceptanceByPosition:
    """Acceptance at every position that any round proposed.

    Rounds (depth 2, accepted 2), (depth 2, accepted 0), (depth 1, accepted 1): position 1 was accepted in 2 of 3,
    position 2 in 1 of 2; of the rounds that proposed it, only the first had accepted position 1: conditionally 1 of 1.
    """
    rounds = decided(steps)
    unconditional: list[float] = []
    conditional: list[float | None] = []
    counts: list[int] = []
    for position in range(1, max((step.proposed_depth for step in rounds), default=0) + 1):
        proposed = [step for step in rounds if step.proposed_depth >= position]
        reached = sum(step.accepted >= position - 1 for step in proposed)
        accepted = sum(step.accepted >= position for step in proposed)
        unconditional.append(accepted / len(proposed))
        conditional.append(accepted / reached if reached else None)
        counts.append(len(proposed))
    return AcceptanceByPosition(
        unconditional=tuple(unconditional), conditional=tuple(conditional), rounds=tuple(counts)
    )


def stage_seconds(steps: "Iterable[Step]") -> dict[str, float]:
    """Seconds of each stage, in all rounds together.

    Rows that shared a round carry one and the same ``seconds`` mapping, and it is counted once.
    """
    # Keyed by identity: the steps keep the mappings alive, and two rounds may well take equally long.
    mappings = {id(step.seconds): step.seconds for step in steps}
    totals: dict[str, float] = {}
    for seconds in mappings.values():
        for stage, value in seconds.items():
            totals[stage] = totals.get(stage, 0.0) + value
    return totals


def distinct_n_gram_rate(token_ids: Sequence[int], n: int = 4) -> float | None:
    """Distinct n-grams over all n-grams of one output: low where it loops. None if it is shorter than n.

    ``1 2 1 2 1`` has the 2-grams 12 21 12 21: the rate is 2/4.
    """
    grams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def decided(steps: Iterable[AnyRound]) -> list[AnyRound]:
    """The rounds that count: all but those that went wrong and decided nothing."""
    return [step for step in steps if step.error is None and step.finish_reason != "error"]
