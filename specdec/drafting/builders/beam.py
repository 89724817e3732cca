"""What builders have in common that expand the best nodes of every level."""

import torch

from specdec.arguments import whole
from specdec.drafting.builders.base import TreeBuilder
from specdec.shape import MOST_NODES


class BeamTree(TreeBuilder):
    """Expands the best nodes of every level, and keeps the best of all nodes that these offer.

    A subclass says what is best, in ``grow``.

    Args:
        nodes: Drafted nodes of a tree.
        depth: The deepest node.
        width: How many nodes are expanded at every level, and how many children each of them offers.

    Raises:
        ValueError: A number is out of its range, or the levels do not offer ``nodes`` nodes.
    """

    renumbers = True

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

    def offered(self, depth: int) -> int:
        """Returns how many nodes the first ``depth`` levels offer."""
        return self.width + (depth - 1) * self.width**2

    def bind(self, device: torch.device, *, leaves: bool = False) -> None:
        """No tables are needed."""
