"""Length policies: they decide before a round how deep its drafts may be."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from specdec.arguments import whole

Slots = Int[np.ndarray, " batch"]


class LengthPolicy(ABC):
    """Decides before a round how deep each row's drafts may be, from how earlier rounds went.

    That is exact with every rule, however drafts are drawn: whether there is a node of some depth is settled before any
    token of the round is known. What may not be is a length that depends on the very token it cuts off (DSpark, arXiv
    2607.05147, appendix A).

    Attributes:
        foresees: What the policy is told of a round before it is played, which only a replay in virtual time knows;
            None for nothing. ``"accepted"``: how many tokens would be accepted of the deepest drafts. ``"margins"``:
            the difference of the drafter's two largest log-probabilities before every token of such drafts.
    """

    foresees: ClassVar[str | None] = None

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        """Begin with a new engine, whose drafter makes drafts of ``max_depth`` at most."""
        self._max_depth = max_depth

    def admit(self, slot: int) -> None:  # noqa: B027
        """Begin a request in ``slot``."""

    def foresee(self, slots: Slots, values: Any) -> None:  # noqa: B027
        """Take what ``foresees`` names, a row for each slot, before ``depths`` is asked for the round."""

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
    """Drafts to one depth in every round; with None, as deep as the drafter can."""

    def __init__(self, depth: int | None = None):
        self.depth = None if depth is None else whole("depth", depth, least=0)

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        return np.full(len(slots), self._max_depth if self.depth is None else min(self.depth, self._max_depth))


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
        super().bind(max_batch_size=max_batch_size, max_depth=max_depth)
        self._depths = np.full(max_batch_size, min(self.start, max_depth))

    def admit(self, slot: int) -> None:
        self._depths[slot] = min(self.start, self._max_depth)

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        return self._depths[slots]

    def note(self, slots: Slots, proposed: Slots, accepted: Slots) -> None:
        """Go up or down; a round in which nothing could be drafted changes nothing."""
        change = np.where(accepted == proposed, self.up, -self.down) * (proposed > 0)
        self._depths[slots] = np.clip(self._depths[slots] + change, min(self.least, self._max_depth), self._max_depth)


class RandomLength(LengthPolicy):
    """Drafts to a depth from 0 to the deepest, drawn anew for every row and round: to record what any length does."""

    def __init__(self, seed: int = 0):
        self.seed = whole("seed", seed, least=0)

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        super().bind(max_batch_size=max_batch_size, max_depth=max_depth)
        self._draws = np.random.default_rng(self.seed)

    def depths(self, slots: Slots, lengths: Slots) -> Slots:
        return self._draws.integers(0, self._max_depth, len(slots), endpoint=True)
