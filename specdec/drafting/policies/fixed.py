"""Always the same length."""

import numpy as np
from jaxtyping import Int

from specdec.arguments import whole
from specdec.drafting.policies.base import LengthPolicy


class FixedLength(LengthPolicy):
    """Drafts to one depth in every round.

    Args:
        depth: This depth; None for as deep as the drafter can.

    Raises:
        ValueError: The depth is negative.
    """

    def __init__(self, depth: int | None = None):
        self.depth = None if depth is None else whole("depth", depth, least=0)

    def depths(self, slots: Int[np.ndarray, " batch"]) -> Int[np.ndarray, " batch"]:
        """Returns the depth for all."""
        return np.full(len(slots), self._max_depth if self.depth is None else self.depth)
