"""As deep as a further token earns more than it costs."""

from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from specdec.arguments import number, whole
from specdec.drafting.costs import RoundCosts
from specdec.drafting.policies.base import LengthPolicy


class CostAwareLength(LengthPolicy):
    """Drafts to the depth at which the expected tokens per measured second are most (goodput).

    Expected are 1 + Σ survival(k) tokens from a draft of some depth, where survival(k) is the probability that k tokens
    or more are accepted; the costs are ``RoundCosts``. Survival is counted in the rounds before: for every request by
    itself, with the average of all requests counting as ``prior`` rounds, and older rounds counting less and less.
    SmartSpec (Liu et al. 2024, arXiv 2406.14066) chooses by goodput, too.

    Args:
        costs: How long rounds take, or a file of that (``RoundCosts.save``). With None, set the attribute before the
            policy is used (``drafters.adaptive.measure_costs``).
        memory: How many rounds it takes until a round counts for 1/e.
        prior: How many rounds the average of all requests counts for.
        explore: Every so many rounds of a request, the draft is as deep as it can be, or nothing would be known of
            depths that are not drafted. 0 never explores.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(
        self,
        costs: RoundCosts | str | Path | None = None,
        *,
        memory: float = 32.0,
        prior: float = 4.0,
        explore: int = 16,
    ):
        self.costs = RoundCosts.load(costs) if isinstance(costs, str | Path) else costs
        self.memory = number("memory", memory, "give a number of rounds, such as 32")
        self.prior = number("prior", prior, "give a number of rounds, such as 4")
        if not self.memory > 0 or not self.prior > 0:
            raise ValueError(f"memory={memory} and prior={prior} are numbers of rounds: give positive numbers")
        self.explore = whole("explore", explore, least=0)

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        """Begin with no round counted.

        Raises:
            ValueError: The costs of rounds are unknown, or were measured with shallower drafts.
        """
        if self.costs is None:
            raise ValueError(
                "this policy needs to know how long rounds take: give costs=…, from drafters.adaptive.measure_costs"
            )
        self.costs.seconds(1, max_depth)
        super().bind(max_batch_size=max_batch_size, max_depth=max_depth)
        self._keep = float(np.exp(-1 / self.memory))
        # [slot, k - 1]: rounds whose drafts had a k-th token and accepted all before it, and those that accepted it.
        self._tried = np.zeros((max_batch_size, max_depth))
        self._right = np.zeros((max_batch_size, max_depth))
        self._rounds = np.zeros(max_batch_size, dtype=np.int64)
        # Counted over all requests. One success and one failure to begin with: one round alone says little.
        self._all_tried = np.full(max_depth, 2.0)
        self._all_right = np.full(max_depth, 1.0)

    def admit(self, slot: int) -> None:
        """Begin with what is known of all requests."""
        self._tried[slot] = self._right[slot] = self._rounds[slot] = 0

    def depths(self, slots: Int[np.ndarray, " batch"]) -> Int[np.ndarray, " batch"]:
        """Returns for every request the depth that is best for a batch of requests like it."""
        assert self.costs is not None, "checked by bind"
        emitted = np.concatenate([np.ones((len(slots), 1)), 1 + self.survival(slots).cumsum(axis=1)], axis=1)
        best = (emitted / self.costs.seconds(len(slots), self._max_depth)).argmax(axis=1)
        due = (self._rounds[slots] + 1) % self.explore == 0 if self.explore else np.zeros(len(slots), dtype=bool)
        return np.where(due, self._max_depth, best)

    def survival(self, slots: Int[np.ndarray, " batch"]) -> Float[np.ndarray, "batch depth"]:
        """Returns the estimated probability that k tokens or more are accepted, for k from 1 on.

        It is the product of the rates at every position given that the one before was accepted. Those mean the same
        whatever depth earlier rounds chose to draft.
        """
        average = self._all_right / self._all_tried
        rates = (self._right[slots] + self.prior * average) / (self._tried[slots] + self.prior)
        return rates.cumprod(axis=1)

    def note(
        self,
        slots: Int[np.ndarray, " batch"],
        proposed: Int[np.ndarray, " batch"],
        accepted: Int[np.ndarray, " batch"],
    ) -> None:
        """Count the round."""
        position = np.arange(1, self._max_depth + 1)
        tried = (proposed[:, None] >= position) & (accepted[:, None] >= position - 1)
        right = accepted[:, None] >= position
        self._tried[slots] = self._tried[slots] * self._keep + tried
        self._right[slots] = self._right[slots] * self._keep + right
        self._rounds[slots] += 1
        self._all_tried = self._all_tried * self._keep + tried.sum(0)
        self._all_right = self._all_right * self._keep + right.sum(0)
