"""The static tree that emits most tokens per round, for every number of nodes and every depth: a dynamic program.

That of Sequoia (Chen et al. 2024, arXiv 2402.12374, section 3.1), but a rate belongs to a rank *and a depth*. Rates
need not fall with the rank, and a rank can be had only with all before it: the n most probable paths may not be best.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import numpy as np
from jaxtyping import Float

from specdec.arguments import shown, whole
from specdec.drafting.lookup import nodes_of_draft
from specdec.shape import TreeShape


@dataclass(frozen=True, eq=False)
class AcceptanceRates:
    """How often the child of each rank is the accepted one, among nodes of the depth above that were accepted.

    One number stands for all nodes of a depth and a rank (Sequoia's positional assumption). ``table[d - 1, r]`` is the
    rate of rank r at depth d; NaN behind the last known rank and depth::

        rates = AcceptanceRates.of([[0.7, 0.1], [0.6]])
        rates.tokens_per_round(TreeShape.from_paths([(0,), (1,), (0, 0)]))  # 1 + 0.7 + 0.1 + 0.7 * 0.6 = 2.22
    """

    table: Float[np.ndarray, "depth rank"]

    def __post_init__(self) -> None:
        known = ~np.isnan(self.table)
        gaps = (known[:, 1:] > known[:, :-1]).any() or (known[1:, 0] > known[:-1, 0]).any() or not known[:1, :1].any()
        if gaps or (self.table < 0).any() or (np.nansum(self.table, axis=1) > 1 + 1e-6).any():
            given = shown(self.table.tolist())
            raise ValueError(f"acceptance rates {given}: give shares without a gap, at most 1 together at any depth")

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> "AcceptanceRates":
        table = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
        for depth, row in enumerate(rows):
            table[depth, : len(row)] = row
        return cls(table)

    @property
    def max_depth(self) -> int:
        return int((~np.isnan(self.table[:, 0])).sum())

    def at(self, depth: int) -> Float[np.ndarray, " rank"]:
        row = self.table[depth - 1] if depth <= len(self.table) else self.table[:0, 0]
        return row[~np.isnan(row)]

    def reached(self, shape: TreeShape) -> Float[np.ndarray, " node"]:
        """Return the probability that each node is accepted with all nodes above it; refuse unknown rates."""
        reached = np.ones(shape.num_nodes + 1)
        for node in range(1, shape.num_nodes + 1):
            depth, rank = shape.depths[node], shape.ranks[node]
            known = self.at(depth)
            if rank >= len(known):
                where = f"a child of rank {rank} at depth {depth}, where {len(known)} ranks have a known rate"
                raise ValueError(f"the tree has {where}: give a smaller tree, or rates of a wider one")
            reached[node] = reached[shape.parents[node]] * known[rank]
        return reached

    def tokens_per_round(self, shape: TreeShape) -> float:
        """Return the expected number of tokens that a round emits, the recovered or bonus token included."""
        return float(self.reached(shape).sum())


@dataclass(frozen=True)
class PlannedShape:
    """A tree, and the expected number of tokens per round, the recovered or bonus token included."""

    shape: TreeShape
    tokens: float

    @property
    def nodes(self) -> int:
        return self.shape.num_nodes

    @property
    def depth(self) -> int:
        return self.shape.max_depth


def fastest(planned: Sequence[PlannedShape], seconds: Callable[[int, int], float]) -> PlannedShape:
    """Return the tree with the most expected tokens per second of (nodes, depth); of equals the smallest."""
    return max(planned, key=lambda each: (each.tokens / seconds(each.nodes, each.depth), -each.nodes))


def best_shapes(rates: AcceptanceRates, *, max_nodes: int, max_depth: int | None = None) -> list[PlannedShape]:
    """Return the best tree of every number of nodes and every bound on the depth, each once, by nodes, then depth.

    It takes O(max_depth² · ranks · max_nodes²) steps. ``max_depth`` None is the deepest node with a known rate.
    """
    max_nodes = nodes_of_draft("max_nodes", max_nodes)
    depth = rates.max_depth if max_depth is None else whole("max_depth", max_depth, least=1)
    if depth > rates.max_depth:
        raise ValueError(f"max_depth={depth}: rates are known to depth {rates.max_depth}: give at most that")
    table = [rates.at(level).tolist() for level in range(1, depth + 1)]

    @cache
    def best(bound: int, level: int, rank: int, nodes: int) -> tuple[float, Below]:
        """The most expected accepted ones among so many nodes: siblings from a rank on, and what is below them."""
        found: tuple[float, Below] = (-inf if nodes else 0.0), ()
        known = table[level] if level < bound else []
        for own in range(nodes if rank < len(known) else 0):
            below, others = best(bound, level + 1, 0, own), best(bound, level, rank + 1, nodes - 1 - own)
            tokens = known[rank] * (1 + below[0]) + others[0]  # not a number where a rate of 0 meets what cannot be
            if tokens > found[0]:
                found = tokens, (below[1], *others[1])
        return found

    every = [best(bound, 0, 0, nodes) for bound in range(1, depth + 1) for nodes in range(1, max_nodes + 1)]
    planned = {(shape := TreeShape(_paths(tree))): PlannedShape(shape, 1 + tokens) for tokens, tree in every if tree}
    return sorted(planned.values(), key=lambda tree: (tree.nodes, tree.depth))


Below = tuple["Below", ...]
"""The children of a node, each as what is below it."""


def _paths(tree: Below, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    below = [_paths(each, (*path, rank)) for rank, each in enumerate(tree)]
    return [found for rank, each in enumerate(below) for found in ((*path, rank), *each)]
