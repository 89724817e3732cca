"""A little longer after success, a little shorter after failure."""

import numpy as np
from jaxtyping import Int

from specdec.arguments import whole
from specdec.drafting.policies.base import LengthPolicy


class AdditiveLength(LengthPolicy):
    """Drafts deeper after a round in which everything was accepted, and less deep after any other.

    This is the ``"heuristic"`` schedule of transformers' assisted generation, for every request by itself.

    Args:
        start: The first round's depth.
        up: How much deeper after a round in which all was accepted.
        down: How much less deep after any other round.
        least: The smallest depth; at least 1, because nothing is learned from rounds without drafts.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(self, start: int = 4, up: int = 2, down: int = 1, least: int = 1):
        self.start, self.least = whole("start", start, least=1), whole("least", least, least=1)
        self.up, self.down = whole("up", up, least=0), whole("down", down, least=0)

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        """Begin all slots with the first depth."""
        super().bind(max_batch_size=max_batch_size, max_depth=max_depth)
        self._depths = np.full(max_batch_size, min(self.start, max_depth))

    def admit(self, slot: int) -> None:
        """Begin with the first depth."""
        self._depths[slot] = min(self.start, self._max_depth)

    def depths(self, slots: Int[np.ndarray, " batch"]) -> Int[np.ndarray, " batch"]:
        """Returns each request's own depth."""
        return self._depths[slots]

    def note(
        self,
        slots: Int[np.ndarray, " batch"],
        proposed: Int[np.ndarray, " batch"],
        accepted: Int[np.ndarray, " batch"],
    ) -> None:
        """Go up or down; a round in which nothing could be drafted changes nothing."""
        change = np.where(accepted == proposed, self.up, -self.down) * (proposed > 0)
        self._depths[slots] = np.clip(self._depths[slots] + change, min(self.least, self._max_depth), self._max_depth)
