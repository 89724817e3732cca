"""A tree builder: which nodes a draft tree gets, and how their tokens are drawn."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.drafting.calibration import Rated
from specdec.drafting.drawing import Drawing
from specdec.drafting.scorer import Scorer
from specdec.tree import DraftTree
from specdec.types import DraftSampling


@dataclass(frozen=True, eq=False)
class Grown:
    """A batch of trees that have been grown, and if there is a rater, how likely their nodes are to be accepted.

    ``nodes`` are the numbers under which the scorer was shown the nodes, -1 for none; None for the tree's own numbers.
    """

    tree: DraftTree
    nodes: Int[Tensor, "batch node"] | None = None
    rated: Rated | None = None


class TreeBuilder(ABC):
    """Decides which nodes a draft tree has, and draws their tokens, by asking a scorer level by level.

    Attributes:
        takes: The laws that sampled requests' nodes may have, the usual one first.
        max_shown: The largest number of nodes that a scorer is shown, the root not counted.
        is_chain: Whether no node has two children. The scorer is then shown an accepted path as nodes 1, 2, 3, …
        is_paths: Whether the trees are paths of one length that share only the root.
        has_leaf_probs: Whether q can be had at the leaves.
        asks_twice: Whether it asks for a level's logits twice, so that these must be cheap (``Scorer.cheap_levels``).
        reorders_nodes: Whether node i of the tree may not be the scorer's node i.
        ranks: How many siblings ``grow`` tells apart when it rates nodes.
        rates_nodes: Whether it rates every node by its own probability, not by the confidence in its parent's children.
            Only trees that are never drawn at random may.
        ordered: Whether nodes may be left out from the end only.
        pruned: Whether nodes may be left out at all, by a ``NodePolicy``.
        ends: Whether trees may be smaller than ``max_nodes``, so that it pays to look how many nodes they have.
    """

    takes: tuple[DraftSampling, ...] = (DraftSampling.IID, *DraftSampling)
    max_nodes: int
    max_depth: int
    max_shown: int
    is_chain: bool = False
    is_paths: bool = False
    has_leaf_probs: bool = False
    asks_twice: bool = False
    reorders_nodes: bool = False
    ranks: int = 1
    rates_nodes: bool = False
    ordered: bool = False
    pruned: bool = True
    ends: bool = False

    def laws(self, sampling: DraftSampling) -> frozenset[DraftSampling]:
        """Return the laws of all nodes where siblings are drawn by one; refuse one that would bias the output."""
        if sampling not in self.takes:
            raise ValueError(
                f"{type(self).__name__} cannot be drawn with sampling={sampling.name.lower()}: to choose "
                f"among drawn nodes would bias the output; use sampling={self.takes[0].name.lower()}, or a static shape"
            )
        return frozenset([sampling])

    def bind(self, device: torch.device, *, leaves: bool = False) -> None:  # noqa: B027
        """Make tables on the device that ``grow`` uses; with ``leaves``, q will be wanted at every node."""

    @abstractmethod
    def grow(self, scorer: Scorer, drawing: Drawing, depth: int) -> Grown:
        """Return trees no deeper than ``depth``, at least 1, without a look at any value."""
