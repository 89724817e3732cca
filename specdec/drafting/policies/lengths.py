"""Length policies: they decide before a round how deep its drafts may be."""

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from specdec.arguments import number, whole
from specdec.drafting.costs import RoundCosts

Slots = Int[np.ndarray, " batch"]

_FIRST = 4
"""Rounds of an engine that explore, because nothing is known yet."""


class LengthPolicy(ABC):
    """Decides before a round how deep each row's drafts may be, from how earlier rounds went.

    That is exact with every rule, however drafts are drawn: whether there is a node of some depth is settled before any
    token of the round is known. What may not be is a length that depends on the very token it cuts off (DSpark, arXiv
    2607.05147, appendix A).
    """

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        """Begin with a new engine.

        Args:
            max_depth: The deepest drafts that the drafter makes.
        """
        self._max_depth = max_depth

    def admit(self, slot: int) -> None:  # noqa: B027
        """Begin a request in ``slot``."""

    @abstractmethod
    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        """Return how deep the drafts for the requests in these slots may be; 0 drafts nothing.

        Args:
            slots: Those of the running requests, one per row of the batch.
            lengths: The tokens in each row's cache.
        """

    def note(self, slots: Slots, proposed: Slots, accepted: Slots) -> None:  # noqa: B027
        """Take note of how a round went.

        Args:
            proposed: How deep the drafts were.
            accepted: How many tokens of them were accepted.
        """


class FixedLength(LengthPolicy):
    """Drafts to one depth in every round.

    Args:
        depth: This depth; None for as deep as the drafter can.
    """

    def __init__(self, depth: int | None = None):
        self.depth = None if depth is None else whole("depth", depth, least=0)

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        return np.full(len(slots), self._max_depth if self.depth is None else self.depth)


class AdditiveLength(LengthPolicy):
    """Drafts deeper after a round in which everything was accepted, and less deep after any other.

    This is the ``"heuristic"`` schedule of transformers' assisted generation, for every request by itself.

    Args:
        start: The first round's depth.
        up: How much deeper after a round in which all was accepted.
        down: How much less deep after any other round.
        least: The smallest depth; at least 1, because nothing is learned from rounds without drafts.
    """

    def __init__(self, start: int = 4, up: int = 2, down: int = 1, least: int = 1):
        self.start, self.least = whole("start", start, least=1), whole("least", least, least=1)
        self.up, self.down = whole("up", up, least=0), whole("down", down, least=0)

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        """Begin all slots with the first depth."""
        super().bind(max_batch_size=max_batch_size, max_depth=max_depth)
        self._depths = np.full(max_batch_size, min(self.start, max_depth))

    def admit(self, slot: int) -> None:
        self._depths[slot] = min(self.start, self._max_depth)

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        """Return each request's own depth."""
        return self._depths[slots]

    def note(self, slots: Slots, proposed: Slots, accepted: Slots) -> None:
        """Go up or down; a round in which nothing could be drafted changes nothing."""
        change = np.where(accepted == proposed, self.up, -self.down) * (proposed > 0)
        self._depths[slots] = np.clip(self._depths[slots] + change, min(self.least, self._max_depth), self._max_depth)


class CostAwareLength(LengthPolicy):
    """Drafts to the depth at which the expected tokens per measured second are most (goodput).

    Expected are 1 + Σ survival(k) tokens from a draft of some depth, where survival(k) is the probability that k tokens
    or more are accepted; the costs are ``RoundCosts``. Survival is counted in the rounds before: for every request by
    itself, with the average of all requests counting as ``prior`` rounds, and older rounds counting less and less.
    SmartSpec (Liu et al. 2024, arXiv 2406.14066) chooses by goodput, too.

    Args:
        costs: How long rounds take, or a file of that (``RoundCosts.save``, or calibrated costs). With None, set the
            attribute before the policy is used (``drafters.round_costs.measure_costs``).
        memory: The number of rounds after which a round counts for 1/e.
        prior: How many rounds the average of all requests counts for.
        explore: Every so many rounds, drafts are deeper than is best, or nothing would be known of depths that are not
            drafted: by one token and as deep as they can be in turn. The first few rounds are as deep, too. 0 never
            explores.
        budget: The share of the time that either kind of exploring may cost, by what is known of it; more of it waits.
    """

    def __init__(
        self,
        costs: RoundCosts | str | Path | None = None,
        *,
        memory: float = 300.0,
        prior: float = 16.0,
        explore: int = 16,
        budget: float = 0.005,
    ):
        self.costs = RoundCosts.load(costs) if isinstance(costs, str | Path) else costs
        self.memory = number("memory", memory, "give a number of rounds, such as 300")
        self.prior = number("prior", prior, "give a number of rounds, such as 16")
        if not self.memory > 0 or not self.prior > 0:
            raise ValueError(f"memory={memory} and prior={prior} are numbers of rounds: give positive numbers")
        self.explore = whole("explore", explore, least=0)
        self.budget = number("budget", budget, "give a share of the time, such as 0.005")
        if not 0 <= self.budget <= 1:
            raise ValueError(f"budget={budget}: give a share of the time from 0 to 1")

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        """Begin with no round counted; refuse costs that are unknown, or were measured with shallower drafts."""
        if self.costs is None:
            raise ValueError(
                "this policy needs to know how long rounds take: give costs=…, from drafters.round_costs.measure_costs"
            )
        self.costs.seconds(1, max_depth)
        super().bind(max_batch_size=max_batch_size, max_depth=max_depth)
        self._keep = float(np.exp(-1 / self.memory))
        # [slot, k - 1]: rounds whose drafts had a k-th token and accepted all before it, and those that accepted it.
        self._tried = np.zeros((max_batch_size, max_depth))
        self._right = np.zeros((max_batch_size, max_depth))
        self._played = 0  # rounds
        self._spent = 0.0  # expected seconds of all rounds
        self._lost = dict.fromkeys((1, max_depth), 0.0)  # those that exploring has cost, by how much deeper it went
        # Counted over all requests. One success and one failure to begin with: one round alone says little.
        self._all_tried = np.full(max_depth, 2.0)
        self._all_right = np.full(max_depth, 1.0)

    def admit(self, slot: int) -> None:
        """Begin with what is known of all requests."""
        self._tried[slot] = self._right[slot] = 0

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        """Return for every request the depth that is best for a batch of requests like it."""
        assert self.costs is not None, "checked by bind"
        emitted = np.concatenate([np.ones((len(slots), 1)), 1 + self.survival(slots).cumsum(axis=1)], axis=1)
        seconds = self.costs.seconds(len(slots), self._max_depth)
        speed = emitted / seconds
        chosen = speed.argmax(axis=1)
        deeper = self._deeper()
        if deeper:
            chosen = np.minimum(chosen + deeper, self._max_depth)
            # A deeper draft emits more, too: lost is the time in which the best depth would have emitted as much.
            share = 1 - (speed[np.arange(len(slots)), chosen] / speed.max(axis=1)).mean()
            if self._played >= _FIRST:
                self._lost[deeper] += float(seconds[chosen.max()] * share)
        self._spent += float(seconds[chosen.max()])
        return chosen

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

    def survival(self, slots: Slots) -> Float[np.ndarray, "batch depth"]:
        """Return the estimated probability that k tokens or more are accepted, for k from 1 on.

        It is the product of the rates at every position given that the one before was accepted. Those mean the same
        whatever depth earlier rounds chose to draft.
        """
        average = self._all_right / self._all_tried
        rates = (self._right[slots] + self.prior * average) / (self._tried[slots] + self.prior)
        return rates.cumprod(axis=1)

    def note(self, slots: Slots, proposed: Slots, accepted: Slots) -> None:
        position = np.arange(1, self._max_depth + 1)
        tried = (proposed[:, None] >= position) & (accepted[:, None] >= position - 1)
        right = accepted[:, None] >= position
        self._tried[slots] = self._tried[slots] * self._keep + tried
        self._right[slots] = self._right[slots] * self._keep + right
        self._played += 1
        self._all_tried = self._all_tried * self._keep + tried.sum(0)
        self._all_right = self._all_right * self._keep + right.sum(0)
