"""A static tree shape as a sequence of forwards: which nodes go through the model together, and their children."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.shape import TreeShape
from specdec.topology import Topology


class Level:
    """One level of a shape.

    Attributes:
        start, stop: The consecutive nodes to forward: from the first parent to the last one.
        topology: The topology of all nodes before ``stop``; the nodes to forward are its last ones.
        parents: The nodes of this depth that have children; with ``leaves``, all nodes of this depth.
        rows: Which of the forwarded nodes are parents; None if all are.
        parents_at: The parents as a slice if they stand side by side, otherwise as indices.
        children_at: All their children, which always stand side by side.
        parent_of, row_of, rank_of: Each child's parent, as a node and as an index into ``parents``, and its sibling
            rank.
        by_rank: For every rank, the children of that rank (as indices into the children) and their parents' rows.
        width: The largest number of children of a parent; 0 at the last level, which exists only with ``leaves``.
    """

    def __init__(self, shape: TreeShape, depth: int, device: torch.device, *, leaves: bool):
        parents = [node for node, d in enumerate(shape.depths) if d == depth and (leaves or shape.children[node])]
        self.depth = depth
        family = [(child, row, rank) for row, p in enumerate(parents) for rank, child in enumerate(shape.children[p])]
        family.sort()
        self.start, self.stop = parents[0], parents[-1] + 1
        self.width = max(len(shape.children[parent]) for parent in parents)
        self.one_each = all(len(shape.children[parent]) == 1 for parent in parents)

        def index(values: Sequence[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.long, device=device)

        self.topology = Topology.of_shape(shape, device).first(self.stop)
        self.parents = index(parents)
        self.rows = None if len(parents) == self.stop - self.start else self.parents - self.start
        self.parents_at = slice(self.start, self.stop) if self.rows is None else self.parents
        first = family[0][0] if family else 0
        self.children_at = slice(first, first + len(family))
        self.row_of = index([row for _, row, _ in family])
        self.rank_of = index([rank for _, _, rank in family])
        self.parent_of = self.parents[self.row_of]
        self.by_rank = [
            (
                index([i for i, (_, _, r) in enumerate(family) if r == rank]),
                index([row for _, row, r in family if r == rank]),
            )
            for rank in range(self.width)
        ]


class LevelPlan:
    """A shape's levels and index tensors, made once; ``level_of`` has the level that scores each drafted node."""

    def __init__(self, shape: TreeShape, device: torch.device, *, leaves: bool = False):
        self.shape = shape
        with torch.inference_mode(False):
            self.levels = [Level(shape, depth, device, leaves=leaves) for depth in range(shape.max_depth + leaves)]
            self.level_of = torch.tensor(shape.depths[1:], dtype=torch.long, device=device) - 1
            self.rank_of = torch.tensor(shape.ranks[1:], dtype=torch.long, device=device)
        self.width = 1 + max(shape.ranks)

    @classmethod
    def by_depth(cls, shape: TreeShape, device: torch.device, *, leaves: bool = False) -> dict[int, "LevelPlan"]:
        """Return a plan for every depth that a round may have room for."""
        return {depth: cls(shape.cut(depth), device, leaves=leaves) for depth in range(1, shape.max_depth + 1)}
