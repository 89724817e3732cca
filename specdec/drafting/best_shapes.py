"""The static tree that emits most tokens per round, for every number of nodes and every depth: a dynamic program.

That of Sequoia (Chen et al. 2024, arXiv 2402.12374, section 3.1), but a rate belongs to a rank *and a depth*. Rates
need not fall with the rank, and a rank can be had only with all before it: the n most probable paths may not be best.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from specdec.arguments import shown, whole
from specdec.drafting.costs import RoundCosts
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
        if self.table.ndim != 2 or not self.table.size or not known[0, 0]:
            raise ValueError(
                f"acceptance rates of shape {self.table.shape}: give one row per depth and one column per rank, the "
                f"rate of rank 0 at depth 1 at least"
            )
        if (known[:, 1:] & ~known[:, :-1]).any() or (known[1:, 0] & ~known[:-1, 0]).any():
            raise ValueError("acceptance rates are known behind ranks or depths where they are not: fill in the gap")
        if (self.table < 0).any() or (np.nansum(self.table, axis=1) > 1 + 1e-6).any():
            raise ValueError(
                f"acceptance rates {shown(self.table[known].tolist())}: give each rank's share of all nodes whose "
                f"parent was accepted, from 0, which add up to 1 at most at any depth"
            )

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
                raise ValueError(
                    f"the tree has a child of rank {rank} at depth {depth}, where "
                    f"{f'the first {len(known)} ranks have' if len(known) else 'no rank has'} a known acceptance rate: "
                    f"give a smaller tree, or rates of a wider one"
                )
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


def fastest(planned: Sequence[PlannedShape], costs: RoundCosts) -> PlannedShape:
    """Return the tree with the most expected tokens per second; of equal ones, that with the fewest nodes."""
    return max(planned, key=lambda each: (each.tokens / costs.of(each.nodes, each.depth), -each.nodes))


def best_shapes(rates: AcceptanceRates, *, max_nodes: int, max_depth: int | None = None) -> list[PlannedShape]:
    """Return the best tree of every number of nodes and every bound on the depth, each once, by nodes, then depth.

    It takes O(max_depth² · ranks · max_nodes²) steps. ``max_depth`` None is the deepest node with a known rate.
    """
    max_nodes = nodes_of_draft("max_nodes", max_nodes)
    depth = rates.max_depth if max_depth is None else whole("max_depth", max_depth, least=1)
    if depth > rates.max_depth:
        raise ValueError(
            f"max_depth={depth}: acceptance rates are known to depth {rates.max_depth}; give at most that, or rates of "
            f"deeper drafts"
        )
    planned: dict[TreeShape, PlannedShape] = {}
    for bound in range(1, depth + 1):
        levels = _levels(rates, max_nodes, bound)
        best = levels[0].best
        for nodes in range(1, max_nodes + 1):
            if np.isfinite(best[nodes]):
                shape = TreeShape(_paths(levels, 0, nodes, ()))
                planned.setdefault(shape, PlannedShape(shape, 1 + float(best[nodes])))
    return sorted(planned.values(), key=lambda tree: (tree.nodes, tree.depth))


@dataclass(frozen=True, eq=False)
class _Level:
    """The most expected accepted nodes below one of some depth, by their number, and its ``children``.

    ``taken`` says for each number of children b and of nodes, how many of these the b-th child and those below it are.
    """

    best: Float[np.ndarray, " nodes"]
    children: Int[np.ndarray, " nodes"]
    taken: list[Int[np.ndarray, " nodes"]]


def _levels(rates: AcceptanceRates, max_nodes: int, depth: int) -> list[_Level]:
    size = max_nodes + 1
    none = np.full(size, -np.inf)  # without children
    none[0] = 0.0
    levels = [_Level(none, np.zeros(size, dtype=np.int64), [])]  # below the deepest nodes stands nothing
    for above in reversed(range(depth)):
        below = levels[0].best
        with_children = [none]
        taken: list[np.ndarray] = []
        for rate in rates.at(above + 1):
            before, best, share = with_children[-1], np.full(size, -np.inf), np.zeros(size, dtype=np.int64)
            for nodes in range(1, size):  # the child itself, and nodes - 1 below it
                gained = rate * (1 + below[nodes - 1]) if np.isfinite(below[nodes - 1]) else -np.inf
                offered = before[: size - nodes] + gained
                better = offered > best[nodes:]
                best[nodes:][better] = offered[better]
                share[nodes:][better] = nodes
            with_children.append(best)
            taken.append(share)
        table = np.stack(with_children)
        levels.insert(0, _Level(table.max(0), table.argmax(0), taken))
    return levels


def _paths(levels: list[_Level], depth: int, nodes: int, path: tuple[int, ...]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for rank in reversed(range(int(levels[depth].children[nodes]))):
        share = int(levels[depth].taken[rank][nodes])
        found += [(*path, rank), *_paths(levels, depth + 1, share - 1, (*path, rank))]
        nodes -= share
    return found
