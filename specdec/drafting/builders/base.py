"""What a tree builder is, and what builders have in common that expand the best nodes of every level."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.arguments import whole
from specdec.drafting.drawing import Drawing
from specdec.drafting.rating import Rated
from specdec.drafting.scorer import Scorer
from specdec.shape import MOST_NODES
from specdec.tree import DraftTree
from specdec.types import DraftSampling


@dataclass(frozen=True, eq=False)
class Grown:
    """A batch of trees that have been grown.

    Attributes:
        tree: The trees.
        nodes: The number under which the scorer was shown each node; -1 for nodes that it was not shown. None if it was
            shown them under the numbers that they have in the tree (leaves may be missing).
        rated: How likely the nodes are to be accepted; None if the drawing has no rater.
    """

    tree: DraftTree
    nodes: Int[Tensor, "batch node"] | None = None
    rated: Rated | None = None


class TreeBuilder(ABC):
    """Decides which nodes a draft tree has, and draws their tokens, by asking a scorer level by level.

    A builder is a value: it has no state of any request, and one may serve several drafters.

    Attributes:
        max_nodes: The largest number of drafted nodes in a row.
        max_depth: The deepest node.
        max_shown: The largest number of nodes that a scorer is shown, the root not counted.
        is_chain: Whether no node has two children. The scorer is then shown an accepted path as nodes 1, 2, 3, …
        is_paths: Whether the trees are paths of one length that share only the root.
        has_leaf_probs: Whether q can be had at the leaves.
        renumbers: Whether ``grow`` says under which numbers the scorer was shown the nodes.
        ranks: How many siblings ``grow`` tells apart when it rates nodes.
        rates_nodes: Whether it rates every node by its own probability, in place of the confidence in its parent's
            children. Only trees that are never drawn at random may.
        ordered: Whether nodes may be left out from the end only, because the tree's nodes stand in the order in which
            it was decided that there are any.
    """

    max_nodes: int
    max_depth: int
    max_shown: int
    is_chain: bool = False
    is_paths: bool = False
    has_leaf_probs: bool = False
    renumbers: bool = False
    ranks: int = 1
    rates_nodes: bool = False
    ordered: bool = False

    def laws(self, sampling: DraftSampling) -> frozenset[DraftSampling]:
        """Return the laws of sampled requests' nodes, for a drafter that asks for ``sampling``.

        Raises:
            ValueError: The builder cannot draw like that.
        """
        return frozenset([sampling])

    def bind(self, device: torch.device, *, leaves: bool = False) -> None:  # noqa: B027
        """Make tables on the device that ``grow`` uses; with ``leaves``, q will be wanted at every node."""

    @abstractmethod
    def grow(self, scorer: Scorer, drawing: Drawing, depth: int) -> Grown:
        """Return trees no deeper than ``depth``, which is at least 1. Nothing here looks at a value.

        The scorer has caught up with the rows.
        """


class BeamTree(TreeBuilder):
    """Expands the best nodes of every level, and keeps the best of all nodes that these offer.

    A subclass says what is best, in ``grow``.

    Attributes:
        takes: The laws that sampled requests' nodes may have: ``DETERMINISTIC`` alone where the best nodes of all are
            kept, which drawn nodes would not survive.

    Args:
        nodes: Drafted nodes of a tree.
        depth: The deepest node.
        width: How many nodes are expanded at every level, and how many children each of them offers.

    Raises:
        ValueError: A number is out of its range, or the levels do not offer ``nodes`` nodes.
    """

    renumbers = True
    takes: tuple[DraftSampling, ...] = (DraftSampling.DETERMINISTIC,)

    def __init__(self, nodes: int, depth: int, width: int):
        self.max_nodes = whole("nodes", nodes, least=1)
        self.max_depth = whole("depth", depth, least=1)
        self.width = whole("width", width, least=1)
        offered = self.offered(self.max_depth)
        if nodes > min(offered, MOST_NODES):
            raise ValueError(
                f"a tree of nodes={nodes}, and {self.max_depth} levels of width={self.width} offer {offered} (at most "
                f"{MOST_NODES} are allowed): give fewer nodes, or a larger depth or width"
            )
        self.max_shown = self.width * (self.max_depth - 1)
        self.is_chain = self.width == 1

    def laws(self, sampling: DraftSampling) -> frozenset[DraftSampling]:
        if sampling not in self.takes:
            raise ValueError(
                f"{type(self).__name__} cannot be drawn with sampling={sampling.name.lower()}: to choose "
                f"among drawn nodes would bias the output; use sampling={self.takes[0].name.lower()}, or a static shape"
            )
        return frozenset([sampling])

    def offered(self, depth: int) -> int:
        """Return how many nodes the first ``depth`` levels offer."""
        return self.width + (depth - 1) * self.width**2
