"""Length policies: fixed, by the last rounds, by the load, or what pays most by the cost of rounds."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int

from specdec.arguments import number, shown, whole, wholes
from specdec.drafting.costs import RaggedCosts, RoundCosts, needed

Slots = Int[np.ndarray, " batch"]


class LengthPolicy(ABC):
    """Decides before a round how deep each row's drafts may be, from how earlier rounds went.

    That is exact with every rule: whether there is a node of some depth is settled before any token of the round is
    known. A length that depends on the very token it cuts off is not (DSpark, arXiv 2607.05147, appendix A).

    Attributes:
        foresees: Whether ``foresee`` must tell it what only a replay in virtual time knows; an engine refuses it.
    """

    foresees: ClassVar[bool] = False

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        """Begin with a new engine, whose drafter makes drafts of ``max_depth`` at most."""
        self._max_depth = max_depth
        self.begin(max_batch_size)

    def begin(self, rows: int) -> None:  # noqa: B027
        """Begin with so many empty slots."""

    def admit(self, slot: int) -> None:  # noqa: B027
        """Begin a request in ``slot``."""

    def foresee(self, slots: Slots, accepted: Slots) -> None:  # noqa: B027
        """Take how many tokens would be accepted of each slot's deepest draft, before ``depths`` is asked."""

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

    This is the ``"heuristic"`` schedule of transformers' assisted generation, for every request by itself.
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


class TableLength(LengthPolicy):
    """Drafts to the depth that a table has for the number of running rows.

    It is vLLM's ``num_speculative_tokens_per_batch_size``: entries of fewest rows, most rows (inclusive) and depth.
    Between two entries, and above the last one, the depth is that of the entry before.
    """

    def __init__(self, table: Sequence[Sequence[int]]):
        remedy = "give ascending entries [fewest rows, most rows, depth] from one row on, such as [[1,64,3],[65,128,1]]"
        entries, before = [wholes("table", entry, remedy) for entry in table], 0
        for entry in entries or [()]:
            if len(entry) != 3 or not before < entry[0] <= entry[1] or entry[2] < 0 or entries[0][0] != 1:
                raise ValueError(f"table={shown(table)} has the entry {list(entry)}: {remedy}")
            before = entry[1]
        self._begins, self._depths = (np.array([entry[place] for entry in entries]) for place in (0, 2))

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        depth = self._depths[np.searchsorted(self._begins, len(slots), side="right") - 1]
        return np.full(len(slots), min(depth, self._max_depth))


Survival = Float[np.ndarray, "batch depth"]
"""The probability that k tokens or more of a row's draft are accepted, for k from 1 on."""
_FIRST = 4  # rounds of an engine that explore, because nothing is known yet


def best_depths(survival: Survival, costs: RaggedCosts, positions: float) -> Slots:
    """Return the depth of every row with which a round emits the most expected tokens per second.

    Where rows are padded to the deepest draft, a depth that is worthwhile for one is free for all. Otherwise the
    likeliest tokens are gone through, which are beginnings of drafts, for every depth of the deepest draft.
    """
    rows, most = survival.shape
    deepest = np.arange(most + 1)
    if costs.padded:
        emitted = rows + np.concatenate(([0.0], survival.sum(0).cumsum()))
        speed = emitted / costs.ragged(rows, positions, drafted=rows * deepest, deepest=deepest)
        return np.full(rows, speed.argmax())
    shallow = costs.ragged(rows, positions, drafted=np.minimum(deepest, 1), deepest=deepest)
    # Where a level costs nothing by itself, drafts as deep as can be are the only ones to look at.
    caps = (deepest[1:] if np.ptp(shallow[1:]) > 0 else deepest[most:])[:, None]
    gains = survival.ravel()
    order = (-gains).argsort(kind="stable")  # of equals, the earlier token of a row comes first
    allowed = order % most < caps
    emitted = (allowed * gains[order]).cumsum(1) + rows
    speed = emitted / costs.ragged(rows, positions, drafted=allowed.cumsum(1), deepest=caps)
    best, last = divmod(int(speed.argmax()), rows * most)
    if rows / shallow[0] >= speed[best, last]:
        return np.zeros(rows, dtype=np.int64)
    return np.bincount(order[: last + 1][allowed[best, : last + 1]] // most, minlength=rows)


class CostAwareLength(LengthPolicy):
    """Drafts to the depths at which the expected tokens of the batch per measured second are most (goodput).

    ``best_depths`` chooses for all rows together, by the survival of tokens in the rounds before: of every request by
    itself, with the average of all counting as ``prior`` rounds (SmartSpec, Liu et al. 2024, arXiv 2406.14066).

    Args:
        costs: How long rounds take, or a file of that; None is set before the policy is used.
        memory: The number of rounds after which a round counts for 1/e.
        explore: After so many rounds, and in the first few, drafts go deeper: by one token, or to the end. 0: never.
        budget: The share of the time that either kind of exploring may cost; more of it waits.
    """

    def __init__(
        self,
        costs: RaggedCosts | str | Path | None = None,
        *,
        memory: float = 300.0,
        prior: float = 8.0,
        explore: int = 16,
        budget: float = 0.005,
    ):
        self.costs = RoundCosts.load(costs) if isinstance(costs, str | Path) else costs
        positive = "give a positive number of rounds, such as 8"
        self.memory = number("memory", memory, positive, lambda rounds: rounds > 0)
        self.prior = number("prior", prior, positive, lambda rounds: rounds > 0)
        self.explore = whole("explore", explore, least=0)
        remedy = "give a share of the time from 0 to 1, such as 0.005"
        self.budget = number("budget", budget, remedy, lambda share: 0 <= share <= 1)

    def begin(self, rows: int) -> None:
        max_depth, self._known = self._max_depth, needed(self.costs)
        self._known.check_depth(max_depth)
        self._keep = float(np.exp(-1 / self.memory))
        # [slot, k - 1]: rounds whose drafts had a k-th token and accepted all before it; those that accepted it.
        self._counts = np.zeros((2, rows, max_depth))
        self._all = np.zeros((2, max_depth))  # the same of all requests
        self._played = 0  # rounds
        self._spent = 0.0  # expected seconds of all rounds
        self._lost = dict.fromkeys((1, max_depth), 0.0)  # those that exploring has cost, by how much deeper it went

    def admit(self, slot: int) -> None:
        self._counts[:, slot] = 0

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        survival, positions = self.survival(slots), float(lengths.sum())
        chosen = best_depths(survival, self._known, positions)
        seconds, emitted = self._round(survival, chosen, positions)
        if deeper := self._deeper():
            best = emitted / seconds
            chosen = np.minimum(chosen + deeper, self._max_depth)
            # A deeper draft emits more, too: lost is the time in which the best depths would have emitted as much.
            seconds, emitted = self._round(survival, chosen, positions)
            if self._played >= _FIRST:
                self._lost[deeper] += max(seconds - emitted / best, 0.0)
        self._spent += seconds
        return chosen

    def _round(self, survival: Survival, depths: Slots, positions: float) -> tuple[float, float]:
        taken = np.arange(self._max_depth) < depths[:, None]
        drafted, deepest = depths.sum(keepdims=True), depths.max(keepdims=True)
        seconds = self._known.ragged(len(depths), positions, drafted=drafted, deepest=deepest)
        return float(seconds[0]), len(depths) + float(survival[taken].sum())

    def _deeper(self) -> int:
        """Return how much deeper than is best the next round's drafts are, to learn of these depths."""
        if not self.explore:
            return 0
        if self._played < _FIRST:
            return self._max_depth
        turn, rest = divmod(self._played + 1, self.explore)
        # Where nothing is drafted, nothing is learned: one token more is affordable soon, whole drafts may not be.
        for deeper in (1, self._max_depth) if turn % 2 else (self._max_depth, 1):
            if not rest and self._lost[deeper] <= self.budget * self._spent:
                return deeper
        return 0

    def survival(self, slots: Slots) -> Survival:
        # One round alone says little of its depth, and of a depth without any the other depths say what is known.
        (tried, right), (all_tried, all_right) = self._counts[:, slots], self._all
        known = (all_right.sum() + 1) / (all_tried.sum() + 2)
        average = (all_right + 2 * known) / (all_tried + 2)
        return ((right + self.prior * average) / (tried + self.prior)).cumprod(axis=1)

    def note(self, slots: Slots, proposed: Slots, accepted: Slots) -> None:
        position = np.arange(1, self._max_depth + 1)
        tried = (proposed[:, None] >= position) & (accepted[:, None] >= position - 1)
        new = np.stack([tried, accepted[:, None] >= position])
        self._counts[:, slots] = self._counts[:, slots] * self._keep + new
        self._all = self._all * self._keep + new.sum(1)
        self._played += 1


class OracleLength(LengthPolicy):
    """Upper bound: drafts exactly the accepted tokens that are worth their cost."""

    foresees = True

    def __init__(self, costs: RaggedCosts | str | Path | None = None):
        self.costs = RoundCosts.load(costs) if isinstance(costs, str | Path) else costs

    def begin(self, rows: int) -> None:
        needed(self.costs).check_depth(self._max_depth)
        self._accepted = np.zeros(rows, dtype=np.int64)

    def foresee(self, slots: Slots, accepted: Slots) -> None:
        self._accepted[slots] = accepted

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        accepted = np.minimum(self._accepted[slots], self._max_depth)
        survival = (np.arange(self._max_depth) < accepted[:, None]).astype(float)
        return np.minimum(best_depths(survival, needed(self.costs), float(lengths.sum())), accepted)
