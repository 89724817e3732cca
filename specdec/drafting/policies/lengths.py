"""Length policies by fixed rules, by the last rounds, or by the load, as serving engines ship them."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from specdec.arguments import number, shown, whole, wholes

Slots = Int[np.ndarray, " batch"]


class LengthPolicy(ABC):
    """Decides before a round how deep each row's drafts may be, from how earlier rounds went.

    That is exact with every rule: whether there is a node of some depth is settled before any token of the round is
    known. A length that depends on the very token it cuts off is not (DSpark, arXiv 2607.05147, appendix A).

    Attributes:
        foresees: ``"accepted"`` if ``foresee`` must tell how many tokens would be accepted of the deepest drafts of a
            round, which only a replay in virtual time knows; None for nothing.
    """

    foresees: ClassVar[str | None] = None

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        """Begin with a new engine, whose drafter makes drafts of ``max_depth`` at most."""
        self._max_depth = max_depth
        self.begin(max_batch_size)

    def begin(self, rows: int) -> None:  # noqa: B027
        """Begin with so many empty slots."""

    def admit(self, slot: int) -> None:  # noqa: B027
        """Begin a request in ``slot``."""

    def foresee(self, slots: Slots, values: Any) -> None:  # noqa: B027
        """Take what ``foresees`` names, a row for each slot, before ``depths`` is asked for the round."""

    @abstractmethod
    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        """Return how deep the drafts of running requests may be, by their slots and the tokens in their caches."""

    def note(self, slots: Slots, proposed: Slots, accepted: Slots) -> None:  # noqa: B027
        """Take note of a round: how deep the drafts were, and how many tokens of them were accepted."""


class FixedLength(LengthPolicy):
    """Drafts to one depth in every round; with None, as deep as the drafter can."""

    def __init__(self, depth: int | None = None):
        self.depth = None if depth is None else whole("depth", depth, least=0)

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        return np.full(len(slots), self._max_depth if self.depth is None else min(self.depth, self._max_depth))


class AdditiveLength(LengthPolicy):
    """Drafts ``up`` deeper after a round in which everything was accepted, and ``down`` less deep after any other.

    This is the ``"heuristic"`` schedule of transformers' assisted generation, for every request by itself. It begins at
    ``start``. The smallest depth, ``least``, is at least 1, because nothing is learned from rounds without drafts.
    """

    def __init__(self, start: int = 4, up: int = 2, down: int = 1, least: int = 1):
        self.start, self.least = whole("start", start, least=1), whole("least", least, least=1)
        self.up, self.down = whole("up", up, least=0), whole("down", down, least=0)

    def begin(self, rows: int) -> None:
        self._depths = np.full(rows, min(self.start, self._max_depth))

    def admit(self, slot: int) -> None:
        self._depths[slot] = min(self.start, self._max_depth)

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        return self._depths[slots]

    def note(self, slots: Slots, proposed: Slots, accepted: Slots) -> None:
        change = np.where(accepted == proposed, self.up, -self.down) * (proposed > 0)
        self._depths[slots] = np.clip(self._depths[slots] + change, min(self.least, self._max_depth), self._max_depth)


class RandomLength(LengthPolicy):
    """Drafts to a depth from 0 to the deepest, drawn anew for every row and round: to record what any length does."""

    def __init__(self, seed: int = 0):
        self.seed = whole("seed", seed, least=0)

    def begin(self, rows: int) -> None:
        self._draws = np.random.default_rng(self.seed)

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        return self._draws.integers(0, self._max_depth, len(slots), endpoint=True)


class TableLength(LengthPolicy):
    """Drafts to the depth that a table has for the number of running rows.

    The table is vLLM's ``num_speculative_tokens_per_batch_size``: entries of fewest rows, most rows (inclusive) and
    depth. Numbers of rows between two entries, and above the last one, take the depth of the entry before.
    """

    def __init__(self, table: Sequence[Sequence[int]]):
        remedy = "give ascending entries [fewest rows, most rows, depth] from one row on, such as [[1,64,3],[65,128,1]]"
        entries = [wholes("table", entry, remedy) for entry in table]
        before = 0
        for entry in entries:
            if len(entry) != 3 or not before < entry[0] <= entry[1] or entry[2] < 0:
                raise ValueError(f"table={shown(table)} has the entry {list(entry)}: {remedy}")
            before = entry[1]
        if not entries or entries[0][0] != 1:
            raise ValueError(f"table={shown(table)} says nothing of a single row: {remedy}")
        self._begins, self._depths = (np.array([entry[place] for entry in entries]) for place in (0, 2))

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        depth = self._depths[np.searchsorted(self._begins, len(slots), side="right") - 1]
        return np.full(len(slots), min(depth, self._max_depth))


@dataclass
class _Tier:
    """The depths to choose from for a range of batch sizes, the place of the present one, and what is known."""

    candidates: tuple[int, ...]
    place: int
    average: float
    rounds: int = 0


class TieredLength(LengthPolicy):
    """Drafts one token deeper than is accepted on average, out of a few depths for every range of batch sizes.

    The rule is that of SGLang's adaptive speculation (pull requests 21599 and 24055). A moving average of the tokens
    accepted per draft goes down to a smaller depth c at or below c − 1/2 + ``down`` (1/2 + ``down`` for 0), and up from
    a depth c above c − 1/2 + ``up``. A depth of 0 is left for the next one at the next choice, to look again.

    Args:
        tiers: Pairs of the fewest running rows that a tier is for and the depths to choose from, ascending.
        weight: Weight of a round in the average.
        warm_up: Rounds of a tier before its first choice.
        every: Rounds from one choice to the next.
    """

    def __init__(
        self,
        tiers: Sequence[tuple[int, Sequence[int]]],
        *,
        weight: float = 0.2,
        warm_up: int = 10,
        every: int = 5,
        down: float = -0.25,
        up: float = 0.0,
    ):
        remedy = "give pairs of fewest rows and depths, from one row on, such as [[1, [1,3,7]], [64, [1,2,5]]]"
        if not all(isinstance(tier, Sequence) and len(tier) == 2 for tier in tiers):
            raise ValueError(f"tiers={shown(tiers)}: {remedy}")
        self.begins = wholes("tiers", [rows for rows, _ in tiers], remedy)
        self.depths_of = [wholes("tiers", depths, remedy) for _, depths in tiers]
        ascending = self.begins[:1] == (1,) and all(one < other for one, other in pairwise(self.begins))
        if not ascending or not all(depths and min(depths) >= 0 for depths in self.depths_of):
            raise ValueError(f"tiers={shown(tiers)}: {remedy}")
        self.weight = number("weight", weight, "give a share, such as 0.2")
        self.warm_up, self.every = whole("warm_up", warm_up, least=0), whole("every", every, least=1)
        self.down, self.up = number("down", down), number("up", up)

    def begin(self, rows: int) -> None:
        """Begin every tier in the middle of its depths, of which those that the drafter does not reach become one."""
        self._tiers = []
        for depths in self.depths_of:
            candidates = tuple(sorted({min(depth, self._max_depth) for depth in depths}))
            middle = len(candidates) // 2
            self._tiers.append(_Tier(candidates, middle, candidates[middle] - 1.0))
        self._tier = self._tiers[0]

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        self._tier = self._tiers[bisect_right(self.begins, len(slots)) - 1]
        return np.full(len(slots), self._tier.candidates[self._tier.place])

    def note(self, slots: Slots, proposed: Slots, accepted: Slots) -> None:
        """Average over the rows of the round, and choose anew after every few rounds."""
        tier = self._tier
        if not len(slots):
            return
        if tier.candidates[tier.place]:
            tier.average += self.weight * (float(accepted.mean()) - tier.average)
        tier.rounds += 1
        if tier.rounds > self.warm_up and (tier.rounds - self.warm_up) % self.every == 0:
            tier.place = self._chosen(tier)

    def _chosen(self, tier: _Tier) -> int:
        candidates, place = tier.candidates, tier.place
        last = len(candidates) - 1
        if candidates[place] == 0:
            place = min(place + 1, last)
            tier.average = candidates[place] - 1.0 if tier.average < 0 else tier.average
            return place
        while place and tier.average <= abs(candidates[place - 1] - 0.5) + self.down:
            place -= 1
        if place == tier.place:
            while place < last and tier.average > candidates[place] - 0.5 + self.up:
                place += 1
        return place
