"""As far as a draft is likely enough to be accepted."""

from pathlib import Path
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from specdec.arguments import number
from specdec.batch import Batch
from specdec.drafting.policies.nodes import NodePolicy
from specdec.drafting.rating import spared
from specdec.host import can_look


class ConfidenceNodes(NodePolicy):
    """Verifies the nodes whose estimated survival reaches a threshold, and drafts no further than there are any.

    A node's survival is the product of calibrated confidences down its path (DSpark, arXiv 2607.05147, section 3;
    AdaEDL, arXiv 2410.18351, stops by the entropy of q). A chain ends where it falls below the threshold; in a tree
    every branch ends by itself.

    Args:
        threshold: The least survival of a node that is verified; from 0 (all nodes) to 1. A node pays for itself where
            its survival is more than the tokens that the other nodes bring in the time that it takes: 0.15 where it
            takes a fifteenth of a round that brings two tokens. ``CostAwareNodes`` measures this.
        source: See ``NodePolicy``.
        calibration: See ``NodePolicy``.
        learn: See ``NodePolicy``.
        explore: See ``NodePolicy``.

    Raises:
        ValueError: An argument is of the wrong type or out of its range.
    """

    def __init__(
        self,
        threshold: float = 0.15,
        *,
        source: str = "auto",
        calibration: str | Path | None = None,
        learn: bool = True,
        explore: int = 32,
    ):
        super().__init__(source=source, calibration=calibration, learn=learn, explore=explore)
        self.threshold = number("threshold", threshold, "give a probability, such as 0.15")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold={threshold}: give a probability from 0 (all nodes) to 1")

    @property
    def version(self) -> tuple[Any, ...]:
        """Differs after a change of the threshold, too."""
        return self.learn, self.explore, self.threshold

    def kept(self, survival: Float[Tensor, "batch node"], batch: Batch) -> Bool[Tensor, "batch node"]:
        """Returns the nodes that reach the threshold; what is behind them on a path never reaches more."""
        return survival >= self.threshold

    def _least(self) -> float | None:
        if self.explores and not (can_look(self._played) and not spared(self._played, self.explore)):
            return None  # this may be a round in which nothing is left out
        return self.threshold
