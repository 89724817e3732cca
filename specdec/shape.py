"""Static tree shapes: what is known about a draft tree before anything is drafted."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any


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
        distinct = {tuple(int(rank) for rank in path) for path in paths}
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
        if length < 1:
            raise ValueError(f"a chain of {length} drafted tokens: the length must be at least 1")
        return cls([(0,) * depth for depth in range(1, length + 1)])

    @classmethod
    def branching(cls, *factors: int) -> "TreeShape":
        """Returns a tree whose nodes of depth d have ``factors[d]`` children: ``branching(3, 2)`` has 3 + 6 nodes."""
        if not factors or min(factors) < 1:
            raise ValueError(f"branching factors {factors}: give at least one, each at least 1")
        paths: list[tuple[int, ...]] = []
        level: list[tuple[int, ...]] = [()]
        for factor in factors:
            level = [(*path, rank) for path in level for rank in range(factor)]
            paths += level
        return cls(paths)

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> "TreeShape":
        """Returns the tree with these paths, in any order; every path's parent must be among them."""
        return cls(paths)

    @classmethod
    def of(cls, shape: "TreeShape | int | Sequence[int] | Sequence[Sequence[int]]") -> "TreeShape":
        """Returns a shape as a configuration writes it: a chain's length, branching factors, or a list of paths."""
        if isinstance(shape, TreeShape):
            return shape
        if isinstance(shape, int):
            return cls.chain(shape)
        entries: list[Any] = list(shape)
        if entries and all(isinstance(entry, int) for entry in entries):
            return cls.branching(*entries)
        if entries and not any(isinstance(entry, int) for entry in entries):
            return cls.from_paths(entries)
        raise ValueError(f"tree shape {shape!r}: give a length, a list of branching factors, or a list of paths")

    def cut(self, depth: int) -> "TreeShape":
        """Returns the part of the tree that is no deeper than ``depth``, which must be at least 1."""
        return self if depth >= self.max_depth else TreeShape(path for path in self.paths if len(path) <= depth)

    @property
    def num_nodes(self) -> int:
        """The number of drafted nodes; the root is not counted."""
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
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                lists[parent].append(node)
        return tuple(tuple(children) for children in lists)

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
