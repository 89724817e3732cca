"""Length policies that know more of a round than an engine can tell them before it: for replays in virtual time.

A replay knows the target's tokens and what every position's acceptance will be, before it decides how much is drafted.
It tells these policies so by ``foresee`` before it asks for ``depths``. An engine refuses them.
"""

from pathlib import Path

import numpy as np
from jaxtyping import Float

from specdec.arguments import whole
from specdec.drafting.costs import RaggedCosts
from specdec.drafting.margins import MarginEstimator
from specdec.drafting.policies.goodput import best_depths, check_costs, read_costs
from specdec.drafting.policies.lengths import LengthPolicy, Slots


class OracleLength(LengthPolicy):
    """Drafts what will be accepted, and of this what pays: the most that a choice of lengths can reach in a round.

    It looks one round ahead, as every policy here does. It is no rule for an engine: the length depends on the tokens.

    Args:
        costs: What rounds cost; None where drafts are free, to draft all that will be accepted.
    """

    foresees = "accepted"

    def __init__(self, costs: RaggedCosts | str | Path | None = None):
        self.costs = read_costs(costs)

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        super().bind(max_batch_size=max_batch_size, max_depth=max_depth)
        if self.costs is not None:
            check_costs(self.costs, max_depth)
        self._accepted = np.zeros(max_batch_size, dtype=np.int64)

    def foresee(self, slots: Slots, values: Slots) -> None:
        """Take how many tokens would be accepted of each row's deepest draft."""
        self._accepted[slots] = values

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        accepted = np.minimum(self._accepted[slots], self._max_depth)
        if self.costs is None:
            return accepted
        survival = (np.arange(self._max_depth) < accepted[:, None]).astype(float)
        return np.minimum(best_depths(survival, self.costs, float(lengths.sum())), accepted)


class MarginLength(LengthPolicy):
    """Drafts on where the drafter's margin says that the next token pays, as ``CostAwareNodes`` by margin in an engine.

    What a second is worth is known before the round: the tokens per second of the round that ``best_depths`` finds for
    average acceptance. A row takes its next token if the survival, by margins down to that token's, is worth the
    seconds that the token adds, and the batch goes a level deeper if its tokens are worth the seconds of the level. So
    a token is drafted or not for what is known before it is drawn, never for what is behind it.

    Args:
        costs: What rounds cost.
        memory: See ``MarginEstimator``.
        explore: Every so many rounds drafts are as deep as they can be, to learn. 0 for never, after the first rounds.
    """

    foresees = "margins"

    def __init__(self, costs: RaggedCosts | str | Path | None = None, *, memory: float = 2000.0, explore: int = 32):
        self.costs, self.memory = read_costs(costs), memory
        self.explore = whole("explore", explore, least=0)

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        self._known = check_costs(self.costs, max_depth)
        super().bind(max_batch_size=max_batch_size, max_depth=max_depth)
        self.estimator = MarginEstimator(max_depth, memory=self.memory)
        self._margins = np.zeros((max_batch_size, max_depth))
        self._played = 0

    def foresee(self, slots: Slots, values: Float[np.ndarray, "batch depth"]) -> None:
        """Take the margins before every token of each row's deepest draft."""
        self._margins[slots] = values[:, : self._max_depth]

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        self._played += 1
        rows, most, costs = len(slots), self._max_depth, self._known
        if self._played <= 4 or (self.explore and self._played % self.explore == 0):
            return np.full(rows, most)
        positions, deepest = float(lengths.sum()), np.arange(most + 1)
        average = np.tile(self.estimator.average.cumprod(), (rows, 1))
        planned = best_depths(average, costs, positions)
        # Seconds by depth where next to nothing is drafted, and those of the planned round and of whole drafts.
        levels = costs.ragged(rows, positions, drafted=np.minimum(deepest, 1), deepest=deepest)
        drafted = np.array([planned.sum(), rows * most])
        deep = np.array([planned.max(), most])
        round_, whole_ = costs.ragged(rows, positions, drafted=drafted, deepest=deep)
        worth = (rows + average[np.arange(most) < planned[:, None]].sum()) / round_  # tokens per second
        token = max(whole_ - levels[most], 0.0) / (rows * most) * worth
        survival = self.estimator.probabilities(self._margins[slots]).cumprod(1)
        taken = np.logical_and.accumulate(survival >= token, axis=1)
        steps = np.diff(levels) * worth
        if planned.any():  # the first level is the way to the others, which share what it takes to draft at all
            steps[0] = min(steps[0], steps[: planned.max()].mean())
        surplus = ((survival - token) * taken).sum(0)
        pays = np.logical_and.accumulate(surplus >= steps)
        return (taken & pays).sum(1)

    def note(self, slots: Slots, proposed: Slots, accepted: Slots) -> None:
        self.estimator.note(self._margins[slots], proposed, accepted)
