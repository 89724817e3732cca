"""Tree builders: which nodes a draft tree gets, for any scorer."""

from collections.abc import Sequence

from specdec.drafting.builders.base import Grown, TreeBuilder
from specdec.drafting.builders.expansion import BeamSearchTree, ExpansionTree
from specdec.drafting.builders.replayed import ReplayedTree
from specdec.drafting.builders.rheo import RheoTree
from specdec.drafting.builders.sampled import PricedTree, SampledTree
from specdec.drafting.builders.static import StaticTree
from specdec.tree import TreeShape

__all__ = [
    "AnyTree", "BeamSearchTree", "ExpansionTree", "Grown", "PricedTree", "ReplayedTree", "RheoTree", "SampledTree",
    "StaticTree", "TreeBuilder", "tree_of",
]  # fmt: skip

AnyTree = TreeBuilder | TreeShape | int | Sequence[int] | Sequence[Sequence[int]]
"""A tree as a drafter takes it: a builder, or a static shape as ``TreeShape.of`` takes it."""


def tree_of(tree: AnyTree) -> TreeBuilder:
    """Return a builder, of a static shape if none is given."""
    return tree if isinstance(tree, TreeBuilder) else StaticTree(tree)
