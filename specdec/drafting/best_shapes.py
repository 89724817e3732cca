"""The static tree that emits most tokens per round, for every number of nodes and every depth: a dynamic program.

The program is that of Sequoia (Chen et al. 2024, arXiv 2402.12374, section 3.1), with two differences: a rate belongs
to a rank *and a depth*, and the depth of the tree is bounded from above and not fixed, so that one run gives all trees
that may be worth their time. It shares Sequoia's positional assumption, which ``AcceptanceRates`` states.

Where the rates of every depth fall with the rank, the best tree of n nodes is simply that of the n most probable paths.
Measured rates need not fall, and then only the program is right: a rank can be had only with all ranks before it.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from specdec.arguments import whole
from specdec.drafting.acceptance_rates import AcceptanceRates
from specdec.shape import MOST_NODES, TreeShape


@dataclass(frozen=True)
class PlannedShape:
    """A tree, and what it is expected to bring.

    Attributes:
        shape: The tree.
        tokens: The expected number of tokens per round, the recovered or bonus token included.
    """

    shape: TreeShape
    tokens: float

    @property
    def nodes(self) -> int:
        """The number of drafted nodes."""
        return self.shape.num_nodes

    @property
    def depth(self) -> int:
        """The deepest node."""
        return self.shape.max_depth


def best_shapes(rates: AcceptanceRates, *, max_nodes: int, max_depth: int | None = None) -> list[PlannedShape]:
    """Returns the best tree of every number of nodes and every depth.

    For every number of nodes up to ``max_nodes`` and every bound on the depth, this is the tree with the largest
    expected number of tokens. A tree that is best under several bounds is listed once, with its own depth. Larger trees
    than the known ranks allow are left out. The list is sorted by nodes, then by depth.

    It takes O(max_depth² · ranks · max_nodes²) steps.

    Args:
        rates: What is known.
        max_nodes: The most nodes of a tree, the root not counted.
        max_depth: The deepest node, at most; None for the deepest one of which a rate is known.

    Raises:
        ValueError: A bound is out of its range.
    """
    max_nodes = whole("max_nodes", max_nodes, least=1)
    if max_nodes > MOST_NODES:
        raise ValueError(f"max_nodes={max_nodes}: a tree may have at most {MOST_NODES} nodes")
    depth = rates.max_depth if max_depth is None else whole("max_depth", max_depth, least=1)
    if depth > rates.max_depth:
        raise ValueError(
            f"max_depth={depth}: acceptance rates are known to depth {rates.max_depth}; give at most that, or rates of "
            f"deeper drafts"
        )
    found: dict[TreeShape, PlannedShape] = {}
    for bound in range(1, depth + 1):
        levels = _levels(rates, max_nodes, bound)
        best = levels[0].best
        for nodes in range(1, max_nodes + 1):
            if np.isfinite(best[nodes]):
                shape = TreeShape(_paths(levels, 0, nodes, ()))
                found.setdefault(shape, PlannedShape(shape, 1 + float(best[nodes])))
    return sorted(found.values(), key=lambda each: (each.nodes, each.depth))


@dataclass(frozen=True, eq=False)
class _Level:
    """The best subtrees below an accepted node of one depth.

    Attributes:
        best: The most expected accepted nodes below it, with 0, 1, 2, … nodes there; -inf where that cannot be.
        children: How many children it then has.
        taken: For each number of children b and of nodes, how many of the nodes the b-th child and those below it are.
    """

    best: Float[np.ndarray, " nodes"]
    children: Int[np.ndarray, " nodes"]
    taken: list[Int[np.ndarray, " nodes"]]


def _levels(rates: AcceptanceRates, max_nodes: int, depth: int) -> list[_Level]:
    """Returns the best subtrees below nodes of depth 0, 1, … for trees no deeper than ``depth``, deepest first made."""
    none = np.full(max_nodes + 1, -np.inf)
    none[0] = 0.0
    levels = [_Level(none, np.zeros(max_nodes + 1, dtype=np.int64), [])]  # below the deepest nodes stands nothing
    for above in reversed(range(depth)):
        levels.insert(0, _level(rates.at(above + 1), levels[0].best, none))
    return levels


def _level(
    rates: Float[np.ndarray, " rank"], below: Float[np.ndarray, " nodes"], none: Float[np.ndarray, " nodes"]
) -> _Level:
    """Returns the best subtrees below a node, from those below its children.

    Args:
        rates: The acceptance rates of its children, by rank.
        below: ``best`` of the children.
        none: ``best`` without children.
    """
    size = len(none)
    with_children = [none]
    taken: list[np.ndarray] = []
    for rate in rates:
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
    return _Level(table.max(0), table.argmax(0), taken)


def _paths(levels: list[_Level], depth: int, nodes: int, path: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the paths of the best subtree below a node of some depth."""
    found: list[tuple[int, ...]] = []
    for rank in reversed(range(int(levels[depth].children[nodes]))):
        share = int(levels[depth].taken[rank][nodes])
        found += [(*path, rank), *_paths(levels, depth + 1, share - 1, (*path, rank))]
        nodes -= share
    return found
