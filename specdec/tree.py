"""Draft trees: the padded batch of drafted tokens that a round verifies."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int8, Shaped
from torch import Tensor

from specdec.arguments import instance
from specdec.shape import TreeShape
from specdec.topology import Topology, check_bound
from specdec.types import DraftSampling


class Known(NamedTuple):
    """Facts about a tree's tensors, without a look at their values. They hold for these very tensors alone."""

    law: Tensor  # laws that are all ``only_law``, if that is not None
    only_law: DraftSampling | None
    valid: Tensor | None  # marks of a static topology that are all True; None if nobody knows it


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of drafted trees, padded to one number of nodes.

    Siblings stand in the order in which they were drawn. Node 0 is the root: the last token of the sequence.

    Attributes:
        topology: The parent of every node, and bounds on depth and number of children that the host knows.
        valid: False for padding. A valid node's parent is valid, and so is the root.
        law: How each node was drawn (``DraftSampling``).
        draft_probs: Row i is the distribution that the children of node i were drawn from, q; None if every node is
            ``DETERMINISTIC``.
    """

    tokens: Int[Tensor, "batch node"]
    topology: Topology
    valid: Bool[Tensor, "batch node"]
    law: Int8[Tensor, "batch node"]
    draft_probs: Float[Tensor, "batch node vocab"] | None
    known: Known | None = None

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
    ) -> "DraftTree":
        """Returns trees that differ from row to row.

        Args:
            parents: Index of every node's parent, smaller than its own; -1 for the root.
            valid: None if there is no padding.
            sampling: One law for all nodes, or a law per node.
            max_depth: The depth of the deepest valid node, if known; checked when depths are first read.
            max_children: The largest number of valid children of a node, likewise. Loops run over both bounds.
        """
        _check_shapes(tokens, None, parents=parents, valid=valid, draft_probs=draft_probs)
        topology = Topology.from_parents(parents, max_depth=max_depth, max_children=max_children)
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        law, only = _laws(tokens, sampling)
        return cls(tokens, topology, valid, law, draft_probs, Known(law, only, None))

    @classmethod
    def root_only(cls, roots: Int[Tensor, " batch"]) -> "DraftTree":
        """Returns a tree that proposes nothing: verifying it is plain decoding."""
        return cls.of_topology(Topology.chain(1, roots.device), roots[:, None])

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
        """Returns trees that all have one static shape; ``tokens`` includes the root's."""
        instance("shape", shape, TreeShape, "a TreeShape; TreeShape.of makes one of a length, of factors or of paths")
        _check_shapes(tokens, shape.num_nodes + 1, valid=valid, draft_probs=draft_probs)
        topology = Topology.of_shape(shape, tokens.device)
        return cls.of_topology(topology, tokens, sampling=sampling, draft_probs=draft_probs, valid=valid)

    @classmethod
    def of_topology(
        cls,
        topology: Topology,
        tokens: Int[Tensor, "batch node"],
        *,
        sampling: DraftSampling | Int8[Tensor, "batch node"] = DraftSampling.DETERMINISTIC,
        draft_probs: Float[Tensor, "batch node vocab"] | None = None,
        valid: Bool[Tensor, "batch node"] | None = None,
    ) -> "DraftTree":
        """Returns trees that share one static topology (``Topology.of_shape``, ``Topology.chain``)."""
        law, only = _laws(tokens, sampling)
        marks = _whole(topology).valid.expand(len(tokens), -1) if valid is None else valid
        return cls(tokens, topology, marks, law, draft_probs, Known(law, only, marks if valid is None else None))

    @property
    def is_static(self) -> bool:
        """Whether the rows are known to share the topology of a static shape."""
        return self.topology.static and self.topology.parents.shape[0] == 1

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def max_depth(self) -> int:
        return self.topology.max_depth

    @property
    def max_children(self) -> int:
        return self.topology.max_children

    @property
    def in_line(self) -> bool:
        return self.topology.in_line

    @property
    def only_law(self) -> DraftSampling | None:
        """The law of all nodes, if the host knows that they have one."""
        return self.known.only_law if self.known is not None and self.known.law is self.law else None

    @property
    def is_whole(self) -> bool:
        """Whether the host knows that every node of a static shape is valid."""
        return self.known is not None and self.known.valid is self.valid

    @cached_property
    def parents(self) -> Int[Tensor, "batch node"]:
        return self.topology.parents.expand(self.tokens.shape[0], -1)

    @cached_property
    def depth(self) -> Int[Tensor, "batch node"]:
        """The depth of every node, 0 for the root; a valid one deeper than the tree's bound is refused."""
        depth = self.topology.depth
        deeper = self.topology.deeper
        if deeper is not None:
            message = f"max_depth={self.max_depth}: a drafted node is deeper; give the depth of the deepest one"
            check_bound(~(deeper & self.valid), message)
        return depth.expand(self.tokens.shape[0], -1)

    @cached_property
    def size(self) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        """The number of valid drafted nodes of every row, and the depth of its longest branch."""
        if self.is_whole:
            nodes, depth = _whole(self.topology).size
            return nodes.expand(len(self.tokens)), depth.expand(len(self.tokens))
        return self.valid.sum(-1) - 1, (self.depth * self.valid).amax(-1)

    @cached_property
    def ancestors(self) -> Bool[Tensor, "batch node node"]:
        return self.topology.ancestors.expand(self.tokens.shape[0], -1, -1)

    @cached_property
    def children(self) -> Int[Tensor, "batch node rank"]:
        """The valid children of every node in sibling order, -1 padded to ``max_children``; more are refused."""
        batch, nodes = self.tokens.shape
        if self.is_whole:
            return _whole(self.topology).children.expand(batch, -1, -1)
        most = self.max_children
        table = torch.full((batch, nodes, most + 1), -1, dtype=torch.long, device=self.tokens.device)
        if most == 0 or nodes == 1:
            return table[:, :, :most]
        index = torch.arange(nodes, device=self.tokens.device)
        counted = self.valid & (self.parents >= 0)
        same = (self.parents[:, :, None] == self.parents[:, None, :]) & counted[:, None, :]
        rank = (same & (index[None, :] < index[:, None])).sum(-1)
        if self.topology.deeper is not None:  # a static shape's bounds are its own
            message = f"max_children={most}: a drafted node has more children; give the most that a node has"
            check_bound((rank < most) | ~counted, message)
        # Padding goes to the surplus last column, which is cut off.
        rank = rank.where(counted, most)
        flat = self.parents.clamp(min=0) * (most + 1) + rank
        table.view(batch, -1).scatter_(1, flat, index.expand(batch, -1))
        return table[:, :, :most]

    def padded(self, width: int, *, max_depth: int, max_children: int, shape: TreeShape | None = None) -> "DraftTree":
        """Returns the same trees with invalid nodes at the end, ``width`` in all, and with looser bounds.

        The new nodes have the root's token. They are its children, or stand as in a ``shape`` that begins as this one.
        """
        more, pad = width - self.width, torch.nn.functional.pad
        tokens = torch.cat([self.tokens, self.tokens[:, :1].expand(-1, more)], dim=1)
        law = pad(self.law, (0, more)) if self.only_law is None else self.only_law
        valid = pad(self.valid, (0, more))
        probs = None if self.draft_probs is None else pad(self.draft_probs, (0, 0, 0, more))
        if shape is not None:
            return DraftTree.from_shape(shape, tokens, sampling=law, valid=valid, draft_probs=probs)
        parents = pad(self.topology.parents, (0, more)).expand(len(tokens), -1)
        bounds = {"max_depth": max_depth, "max_children": max_children}
        return DraftTree.build(tokens, parents, sampling=law, valid=valid, draft_probs=probs, **bounds)

    def rows(self, part: slice) -> "DraftTree":
        topology = self.topology if self.topology.parents.shape[0] == 1 else self.topology.rows(part)
        valid, law, q = self.valid[part], self.law[part], self.draft_probs
        known = Known(law, self.only_law, valid if self.is_whole else None)
        return DraftTree(self.tokens[part], topology, valid, law, None if q is None else q[part], known)

    def limited(self, depth: Int[Tensor, " batch"]) -> "DraftTree":
        """Returns the same tree with the nodes deeper than each row's ``depth`` made invalid, with the root's token.

        Others that are not valid keep their tokens: a session may want to know what the target says there.
        """
        within = self.depth <= depth[:, None]
        return replace(self, valid=self.valid & within, tokens=self.tokens.where(within, self.tokens[:, :1]))


def along_path(
    values: Shaped[Tensor, "batch node ..."], path: Int[Tensor, "batch depth"]
) -> Shaped[Tensor, "batch position ..."]:
    """Returns values at the root and along a path (``position`` = 1 + depth); padding repeats the root's."""
    nodes = torch.nn.functional.pad(path.clamp(min=0), (1, 0))
    index = nodes.view(*nodes.shape, *[1] * (values.ndim - 2)).expand(*nodes.shape, *values.shape[2:])
    return values.gather(1, index)


def _laws(tokens: Tensor, sampling: DraftSampling | Tensor) -> tuple[Int8[Tensor, "batch node"], DraftSampling | None]:
    if isinstance(sampling, Tensor):
        return sampling, None
    return torch.full_like(tokens, int(sampling), dtype=torch.int8), sampling


class _Whole(NamedTuple):
    """What trees of a static topology share if all of their nodes are valid."""

    valid: Bool[Tensor, "1 node"]
    children: Int[Tensor, "1 node rank"]
    size: tuple[Int[Tensor, "1"], Int[Tensor, "1"]]


@lru_cache(maxsize=1024)
def _whole(topology: Topology) -> _Whole:
    with torch.inference_mode(False):
        parents = topology.parents
        valid = torch.ones_like(parents, dtype=torch.bool)
        tree = DraftTree(parents, topology, valid, _laws(parents, DraftSampling.DETERMINISTIC)[0], None)
        return _Whole(valid, tree.children, tree.size)


def _check_shapes(
    tokens: Tensor,
    width: int | None,
    *,
    parents: Tensor | None = None,
    valid: Tensor | None,
    draft_probs: Tensor | None,
) -> None:
    """Refuse tensors of a tree whose shapes do not fit; ``width`` counts the root, and is None for any number."""
    if tokens.dim() != 2 or tokens.shape[1] == 0 or width not in (None, tokens.shape[1]):
        one = f"[batch, {width}], the root and {(width or 1) - 1} nodes"
        wanted = "[batch, node], the root first" if width is None else one
        raise ValueError(f"the tokens of a draft tree have shape {list(tokens.shape)}: give {wanted}")
    for name, tensor in (("parents", parents), ("valid", valid)):
        if tensor is not None and tensor.shape != tokens.shape:
            raise ValueError(
                f"{name} of a draft tree has shape {list(tensor.shape)}: give {list(tokens.shape)}, as tokens has"
            )
    if draft_probs is not None and (draft_probs.dim() != 3 or draft_probs.shape[:2] != tokens.shape):
        raise ValueError(
            f"draft_probs of a draft tree has shape {list(draft_probs.shape)}: "
            f"give [{tokens.shape[0]}, {tokens.shape[1]}, vocab], a row for every node"
        )
