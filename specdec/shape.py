"""Static tree shapes: what is known about a draft tree before anything is drafted."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from specdec.arguments import shown, whole

MOST_NODES = 4096
"""Drafted nodes of the largest tree. Published ones have about a thousand; p and q of this many are some gigabytes."""
_FORMS = "give a length such as 4, branching factors such as [3, 2, 1], or paths such as [[0], [1], [0, 0]]"


class TreeShape:
    """The shape of a draft tree, known before anything is drafted.

    A path is the tuple of sibling ranks from the root to a node: ``(0,)`` is the root's first child, ``(0, 1)``
    that child's second child (Medusa calls these choices). Nodes are numbered level by level, and within a
    level in lexicographic order of their paths, after the root, which is node 0.

    Attributes:
        paths: One path per drafted node, in node order.
        parents: The parent of every node; -1 for the root.
        depths: The depth of every node; 0 for the root.
        ranks: The sibling rank of every node, the last of its path; 0 for the root.
    """

    def __init__(self, paths: Iterable[Sequence[int]]):
        if isinstance(paths, (str, bytes)) or not isinstance(paths, Iterable):
            raise ValueError(f"the paths of a tree shape are {shown(paths)}: give a list such as [(0,), (0, 0), (1,)]")
        distinct = {_path(path) for path in paths}
        _check_size(len(distinct), f"a tree shape of {len(distinct):,} paths")
        self.paths = tuple(sorted(distinct, key=lambda path: (len(path), path)))
        index = {(): 0} | {path: i + 1 for i, path in enumerate(self.paths)}
        if not self.paths:
            raise ValueError("a tree shape needs at least one path: give for example [(0,), (0, 0), (1,)]")
        for path in self.paths:
            if not path or min(path) < 0:
                raise ValueError(f"path {path} in a tree shape: ranks start at 0 and a path has at least one")
            if path[:-1] not in index:
                raise ValueError(f"path {path} in a tree shape has no parent: add the path {path[:-1]}")
        self.parents = (-1, *(index[path[:-1]] for path in self.paths))
        self.depths = (0, *(len(path) for path in self.paths))
        self.ranks = (0, *(path[-1] for path in self.paths))
        self._hash = hash(self.paths)  # shapes are keys of tables that every round looks into

    @classmethod
    def chain(cls, length: int) -> "TreeShape":
        """Returns one branch of ``length`` drafted nodes."""
        length = whole("chain length", length, least=1)
        _check_size(length, f"a chain of {length:,} drafted tokens")
        return cls([(0,) * depth for depth in range(1, length + 1)])

    @classmethod
    def branching(cls, *factors: int) -> "TreeShape":
        """Returns a tree whose nodes of depth d have ``factors[d]`` children: ``branching(3, 2)`` has 3 + 6 nodes."""
        if len(factors) == 1 and not isinstance(factors[0], int) and isinstance(factors[0], Iterable):
            raise ValueError(
                f"branching factors {shown(factors[0])}: give them one by one, as in TreeShape.branching(3, 2, 1)"
            )
        factors = tuple(whole("branching factor", factor) for factor in factors)
        if not factors or min(factors) < 1:
            raise ValueError(f"branching factors {shown(factors)}: give at least one, each at least 1")
        width, nodes = 1, 0
        for factor in factors:  # counted before any path is made: there may be millions
            width *= factor
            nodes += width
        _check_size(nodes, f"branching factors {list(factors)} make a tree of {nodes:,} nodes")
        ranks = [range(factor) for factor in factors]
        return cls(path for depth in range(len(ranks)) for path in itertools.product(*ranks[: depth + 1]))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> "TreeShape":
        """Returns the tree with these paths, in any order; every path's parent must be among them."""
        return cls(paths)

    @classmethod
    def of(cls, shape: "TreeShape | int | Sequence[int] | Sequence[Sequence[int]]") -> "TreeShape":
        """Returns a shape as a configuration writes it: a chain's length, branching factors, or a list of paths."""
        if isinstance(shape, TreeShape):
            return shape
        if isinstance(shape, (int, float, np.number, np.bool_)):
            return cls.chain(shape)  # which says what is wrong with a float
        if shape is TreeShape:
            raise ValueError("the tree shape is the class TreeShape itself: give one, such as TreeShape.chain(4)")
        if isinstance(shape, (str, bytes, Mapping)) or not isinstance(shape, Iterable):
            raise ValueError(f"the tree shape is {shown(shape)}: {_FORMS}")
        entries: list[Any] = list(shape)
        lists = [isinstance(entry, Iterable) and not isinstance(entry, (str, bytes)) for entry in entries]
        if entries and not any(lists):
            return cls.branching(*entries)
        if entries and all(lists):
            return cls.from_paths(entries)
        raise ValueError(f"the tree shape is {shown(shape)}: {_FORMS}")

    def cut(self, depth: int) -> "TreeShape":
        return self if depth >= self.max_depth else TreeShape(path for path in self.paths if len(path) <= depth)

    @property
    def num_nodes(self) -> int:
        return len(self.paths)

    @property
    def max_depth(self) -> int:
        return self.depths[-1]

    @property
    def is_chain(self) -> bool:
        return self.num_nodes == self.max_depth

    @property
    def is_paths(self) -> bool:
        """Whether the tree consists of paths of one length that share only the root."""
        return self == TreeShape.branching(len(self.children[0]), *[1] * (self.max_depth - 1))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of every node, in sibling order."""
        lists: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            lists[parent].append(node)
        return tuple(map(tuple, lists))

    @property
    def max_children(self) -> int:
        return max(len(children) for children in self.children)

    def __repr__(self) -> str:
        if self.is_chain:
            return f"TreeShape.chain({self.num_nodes})"
        return f"TreeShape.from_paths({list(self.paths)})"

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, TreeShape) and self.paths == other.paths)

    def __hash__(self) -> int:
        return self._hash


def _path(path: object) -> tuple[int, ...]:
    if isinstance(path, (str, bytes)) or not isinstance(path, Iterable):
        raise ValueError(f"a path of a tree shape is {shown(path)}: give a list of sibling ranks, such as (0, 1)")
    return tuple(whole("sibling rank", rank) for rank in path)


def _check_size(nodes: int, what: str) -> None:
    if nodes > MOST_NODES:
        raise ValueError(f"{what}, and a tree may have at most {MOST_NODES:,} nodes: give a smaller shape")
