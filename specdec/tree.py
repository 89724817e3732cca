"""Draft trees: static shapes, and the padded batch of drafted tokens that a round verifies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int8, Shaped
from torch import Tensor

from specdec.types import DraftSampling


class TreeShape:
    """The shape of a draft tree, known before anything is drafted.

    A path is the tuple of sibling ranks from the root to a node: ``(0,)`` is the root's first child, ``(0, 1)``
    that child's second child (Medusa calls these choices). Nodes are numbered level by level, and within a
    level in lexicographic order of their paths, after the root, which is node 0.

    Attributes:
        paths: One per node, root excluded, in node order.
        parents: Parent of every node, root included (-1).
        depths: Depth of every node, root included (0).
        ranks: Last rank of every node's path, root included (0).
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

    @classmethod
    def chain(cls, length: int) -> "TreeShape":
        """One branch of ``length`` nodes."""
        if length < 1:
            raise ValueError(f"a chain of {length} drafted tokens: the length must be at least 1")
        return cls([(0,) * depth for depth in range(1, length + 1)])

    @classmethod
    def branching(cls, *factors: int) -> "TreeShape":
        """Every node of depth d has ``factors[d]`` children: ``branching(3, 2)`` has 3 + 6 nodes."""
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
        """Explicit paths, in any order; every path's parent must be among them."""
        return cls(paths)

    @classmethod
    def of(cls, shape: "TreeShape | int | Sequence[int] | Sequence[Sequence[int]]") -> "TreeShape":
        """A shape as a configuration writes it: a length, branching factors, or a list of paths."""
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
        """The part that is no deeper than ``depth``, which must be at least 1."""
        return self if depth >= self.max_depth else TreeShape(path for path in self.paths if len(path) <= depth)

    @property
    def num_nodes(self) -> int:
        """Drafted nodes, the root not counted."""
        return len(self.paths)

    @property
    def max_depth(self) -> int:
        return self.depths[-1]

    @property
    def is_chain(self) -> bool:
        return self.num_nodes == self.max_depth

    @property
    def is_paths(self) -> bool:
        """Paths of one length that share only the root."""
        return self == TreeShape.branching(len(self.children[0]), *[1] * (self.max_depth - 1))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of every node, in sibling order."""
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
        return isinstance(other, TreeShape) and self.paths == other.paths

    def __hash__(self) -> int:
        return hash(self.paths)


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of drafted trees, padded to one number of nodes.

    Siblings stand in the order in which they were drawn. Node 0 is the root: the last token of the sequence.

    Attributes:
        tokens: Token of every node.
        parents: Index of every node's parent, smaller than its own; -1 for the root.
        valid: False for padding. Closed under ancestors; the root is always valid.
        law: How each node was drawn (``DraftSampling``).
        draft_probs: Row i is the distribution that the children of node i were drawn from, q; only the rows of
            parents matter. None if every node is ``DETERMINISTIC``.
        max_depth: No node is deeper. Known to the host.
        max_children: No node has more children. Known to the host.
        in_line: Every node's parent is the node before it, as in a chain of a static shape. Known to the host, where
            it is known at all.
    """

    tokens: Int[Tensor, "batch node"]
    parents: Int[Tensor, "batch node"]
    valid: Bool[Tensor, "batch node"]
    law: Int8[Tensor, "batch node"]
    draft_probs: Float[Tensor, "batch node vocab"] | None
    max_depth: int
    max_children: int
    in_line: bool = False

    @classmethod
    def build(
        cls,
        tokens: Int[Tensor, "batch node"],
        parents: Int[Tensor, "batch node"],
        *,
        valid: Bool[Tensor, "batch node"] | None = None,
        sampling: DraftSampling | Int8[Tensor, "batch node"] = DraftSampling.DETERMINISTIC,
        draft_probs: Float[Tensor, "batch node vocab"] | None = None,
        max_depth: int | None = None,
        max_children: int | None = None,
        in_line: bool = False,
    ) -> "DraftTree":
        """A tree from its parts; ``sampling`` is one law for all nodes or a law per node.

        The bounds ``max_depth`` and ``max_children`` default to what any tree of this many nodes can have: pass
        tighter ones where they are known, because loops run over them.
        """
        nodes = tokens.shape[1]
        if isinstance(sampling, DraftSampling):
            law = torch.full_like(tokens, int(sampling), dtype=torch.int8)
        else:
            law = sampling
        return cls(
            tokens=tokens,
            parents=parents,
            valid=torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid,
            law=law,
            draft_probs=draft_probs,
            max_depth=nodes - 1 if max_depth is None else max_depth,
            max_children=nodes - 1 if max_children is None else max_children,
            in_line=in_line,
        )

    @classmethod
    def root_only(cls, roots: Int[Tensor, " batch"]) -> "DraftTree":
        """A tree that proposes nothing: verifying it is plain decoding."""
        return cls._of_layout(_layout(None, roots.device), roots[:, None])

    @classmethod
    def from_shape(
        cls,
        shape: TreeShape,
        tokens: Int[Tensor, "batch node"],
        *,
        sampling: DraftSampling | Int8[Tensor, "batch node"] = DraftSampling.DETERMINISTIC,
        draft_probs: Float[Tensor, "batch node vocab"] | None = None,
        valid: Bool[Tensor, "batch node"] | None = None,
    ) -> "DraftTree":
        """A tree whose rows all have the same static shape; ``tokens`` includes the root's."""
        layout = _layout(shape, tokens.device)
        return cls._of_layout(layout, tokens, sampling=sampling, draft_probs=draft_probs, valid=valid)

    @classmethod
    def _of_layout(
        cls,
        layout: "_Layout",
        tokens: Int[Tensor, "batch node"],
        *,
        valid: Bool[Tensor, "batch node"] | None = None,
        **kwargs: Any,
    ) -> "DraftTree":
        batch = tokens.shape[0]
        tree = cls.build(
            tokens,
            layout.parents.expand(batch, -1),
            valid=layout.valid.expand(batch, -1) if valid is None else valid,
            max_depth=layout.max_depth,
            max_children=layout.max_children,
            in_line=layout.in_line,
            **kwargs,
        )
        # Fill the cached properties: for a static shape they need no computation.
        vars(tree).update(depth=layout.depth.expand(batch, -1), ancestors=layout.ancestors.expand(batch, -1, -1))
        if valid is None:
            vars(tree).update(
                children=layout.children.expand(batch, -1, -1),
                size=tuple(figure.expand(batch) for figure in layout.size),
            )
        return tree

    @property
    def width(self) -> int:
        """Columns of the batch: the root, the most drafted nodes of a row, and no more."""
        return self.tokens.shape[1]

    @cached_property
    def depth(self) -> Int[Tensor, "batch node"]:
        """Depth of every node; 0 for the root."""
        depth = torch.zeros_like(self.parents)
        above = self.parents
        for _ in range(self.max_depth):
            depth += above >= 0
            above = self.parents.gather(1, above.clamp(min=0)).where(above >= 0, -1)
        return depth

    @cached_property
    def size(self) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        """Valid drafted nodes of every row, and the depth of its longest branch."""
        return self.valid.sum(-1) - 1, (self.depth * self.valid).amax(-1)

    @cached_property
    def ancestors(self) -> Bool[Tensor, "batch node node"]:
        """``ancestors[b, i, j]``: node j is node i or above it.

        The chain 0 - 1 - 2 with a second child 3 of node 1::

            parents    -1 0 1 1
            ancestors  1 0 0 0
                       1 1 0 0
                       1 1 1 0
                       1 1 0 1
        """
        nodes = self.width
        marks = torch.eye(nodes, dtype=torch.bool, device=self.tokens.device).repeat(self.tokens.shape[0], 1, 1)
        above = self.parents.clamp(min=0)
        for _ in range(self.max_depth):
            marks.scatter_(2, above[..., None], True)
            above = self.parents.gather(1, above).clamp(min=0)
        return marks

    @cached_property
    def children(self) -> Int[Tensor, "batch node rank"]:
        """The valid children of every node in sibling order, -1 padded to ``max_children``."""
        batch, nodes = self.tokens.shape
        table = torch.full((batch, nodes, self.max_children + 1), -1, dtype=torch.long, device=self.tokens.device)
        if self.max_children == 0 or nodes == 1:
            return table[:, :, : self.max_children]
        index = torch.arange(nodes, device=self.tokens.device)
        counted = self.valid & (self.parents >= 0)
        same = (self.parents[:, :, None] == self.parents[:, None, :]) & counted[:, None, :]
        rank = (same & (index[None, :] < index[:, None])).sum(-1)
        # Padding goes to the surplus last column, which is cut off.
        rank = rank.where(counted, self.max_children)
        flat = self.parents.clamp(min=0) * (self.max_children + 1) + rank
        table.view(batch, -1).scatter_(1, flat, index.expand(batch, -1))
        return table[:, :, : self.max_children]

    def limited(self, depth: Int[Tensor, " batch"]) -> "DraftTree":
        """The same tree with the nodes deeper than each row's ``depth`` made invalid."""
        tree = replace(self, valid=self.valid & (self.depth <= depth[:, None]))
        known = vars(self)
        vars(tree).update({name: known[name] for name in ("depth", "ancestors") if name in known})
        if "children" in known:
            # All children of a node are of one depth: they go together, and sibling ranks stay.
            keeps = (self.depth < depth[:, None])[..., None]
            vars(tree)["children"] = known["children"].where(keeps, -1)
        return tree

    def gather_path(
        self, values: Shaped[Tensor, "batch node ..."], path: Int[Tensor, "batch depth"]
    ) -> Shaped[Tensor, "batch position ..."]:
        """Values at the root and along a path (``position`` = 1 + depth); padding repeats the root's."""
        nodes = torch.nn.functional.pad(path.clamp(min=0), (1, 0))
        index = nodes.view(*nodes.shape, *[1] * (values.ndim - 2)).expand(*nodes.shape, *values.shape[2:])
        return values.gather(1, index)


@dataclass(frozen=True, eq=False)
class _Layout:
    parents: Int[Tensor, "1 node"]
    valid: Bool[Tensor, "1 node"]
    depth: Int[Tensor, "1 node"]
    ancestors: Bool[Tensor, "1 node node"]
    children: Int[Tensor, "1 node rank"]
    size: tuple[Int[Tensor, "1"], Int[Tensor, "1"]]
    max_depth: int
    max_children: int
    in_line: bool


_layouts: dict[tuple[TreeShape | None, torch.device], _Layout] = {}


def _layout(shape: TreeShape | None, device: torch.device) -> _Layout:
    """A shape's index tensors on a device, made once; without a shape, those of a root alone."""
    key = (shape, device)
    if key not in _layouts:
        max_depth, max_children = (0, 0) if shape is None else (shape.max_depth, shape.max_children)
        in_line = shape is None or shape.is_chain
        with torch.inference_mode(False):
            parents = torch.tensor([(-1,) if shape is None else shape.parents], device=device)
            tree = DraftTree.build(parents, parents, max_depth=max_depth, max_children=max_children)
            _layouts[key] = _Layout(
                parents,
                tree.valid,
                tree.depth,
                tree.ancestors,
                tree.children,
                tree.size,
                max_depth,
                max_children,
                in_line,
            )
    return _layouts[key]
