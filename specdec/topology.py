"""How the nodes of a draft tree are connected: parents, and what follows from them."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from specdec.host import can_look
from specdec.kernels import usable
from specdec.shape import TreeShape


class Tables(NamedTuple):
    """Tables of a topology under its own names, as far as they were made already; they hold for these parents alone."""

    parents: Int[Tensor, "rows node"]
    depth: Int[Tensor, "rows node"]
    ancestors: Bool[Tensor, "rows node node"]
    deeper: Bool[Tensor, "rows node"] | None = None
    ancestor_words: Int[Tensor, "rows node word"] | None = None


@dataclass(frozen=True, eq=False)
class Topology:
    """The parents of the nodes of some trees, with bounds on depth and number of children that the host knows.

    Node 0 is the root, and every parent stands before its children. Rows that share one topology store it once:
    ``rows`` is then 1, and everything here broadcasts over the batch.

    Attributes:
        static: Whether the host knows all parents, because they come from a shape. Tables that follow from them are
            then made once, and the host may look at them.
        windowed: What the nodes of a block see in layers with a window, and where from it counts (``depth``), if that
            is another topology.
        given: The tables, where whoever made the topology has them; otherwise they follow from the parents.
    """

    parents: Int[Tensor, "rows node"]  # index of every node's parent; -1 for the root
    max_depth: int  # a bound: no node is deeper
    max_children: int  # a bound: no node has more children
    in_line: bool = False  # every node's parent is the node before it; False if that is not known
    static: bool = False
    both_ways: bool = False  # nodes also see those below them (``block``); for forwards only
    windowed: "Topology | None" = None
    given: Tables | None = None

    @staticmethod
    @lru_cache(maxsize=1024)
    def of_shape(shape: TreeShape, device: torch.device) -> "Topology":
        """Returns the topology of a static shape, with all that can be derived from it; made once per device."""
        with torch.inference_mode(False):  # it serves forwards inside and outside of inference mode
            parents = torch.tensor([shape.parents], device=device)
            topology = Topology(parents, shape.max_depth, shape.max_children, in_line=shape.is_chain, static=True)
            return replace(topology, given=Tables(parents, topology.depth, topology.ancestors))

    @classmethod
    def chain(cls, width: int, device: torch.device) -> "Topology":
        """Returns a root and ``width - 1`` nodes in line below it; made once per device, but for long ones."""
        return (_short_chain if width <= _MOST_KEPT else _new_chain)(width, device)

    @staticmethod
    @lru_cache(maxsize=1024)
    def block(
        width: int,
        device: torch.device,
        *,
        causal: bool = False,
        causal_in_windows: bool | None = None,
        window_from_root: bool = False,
    ) -> "Topology":
        """Returns ``width`` nodes at consecutive positions which all see each other: ``ancestors`` is all True.

        So a block drafter fills its slots together. Made once per device.

        Args:
            causal: Whether a node sees only those before it: a chain.
            causal_in_windows: The same in layers with a window; None if nodes see there what they see in others.
            window_from_root: Whether windows count from the root for all nodes, and not from each node.
        """
        in_windows = causal if causal_in_windows is None else causal_in_windows
        chain = Topology.chain(width, device)
        with torch.inference_mode(False):
            every, nowhere = torch.ones_like(chain.ancestors), torch.zeros_like(chain.depth)

        def seen(causal: bool, depth: Tensor, windowed: Topology | None) -> Topology:
            tables = Tables(chain.parents, depth, chain.ancestors if causal else every)
            return replace(chain, in_line=False, both_ways=not causal, windowed=windowed, given=tables)

        if in_windows is causal and not window_from_root:
            return chain if causal else seen(causal, chain.depth, None)
        windowed = seen(in_windows, nowhere if window_from_root else chain.depth, None)
        return seen(causal, chain.depth, windowed)

    def in_layers(self, *, windowed: bool) -> "Topology":
        return self if self.windowed is None or not windowed else self.windowed

    @classmethod
    def from_parents(
        cls, parents: Int[Tensor, "rows node"], *, max_depth: int | None = None, max_children: int | None = None
    ) -> "Topology":
        """Returns the topology of trees that differ from row to row.

        Bounds save loops and memory. If they are not given (``DraftTree`` checks those), they are derived from the
        parents on a CPU. On a GPU, where looking at the parents would wait for the device, they are the most that a
        tree of this many nodes can have.
        """
        most = parents.shape[1] - 1
        if can_look(parents):
            max_depth = _deepest(parents) if max_depth is None else max_depth
            max_children = _most_children(parents) if max_children is None else max_children
        depth, children = (most if bound is None else min(bound, most) for bound in (max_depth, max_children))
        return cls(parents, depth, children)

    @property
    def width(self) -> int:
        return self.parents.shape[1]

    @cached_property
    def _tables(self) -> Tables | None:
        """Tables that were given, or that a kernel makes; None if torch makes them one by one."""
        if self.given is not None and self.given.parents is self.parents:
            return self.given
        if not usable(self.parents):
            return None
        from specdec.kernels.trees import connected

        return Tables(self.parents, **connected(self.parents, self.max_depth))

    @cached_property
    def _depths(self) -> tuple[Int[Tensor, "rows node"], Bool[Tensor, "rows node"] | None]:
        if self._tables is not None:
            return self._tables.depth, self._tables.deeper
        depth = torch.zeros_like(self.parents)
        above = self.parents
        for _ in range(self.max_depth):
            depth += above >= 0
            above = self.parents.gather(1, above.clamp(min=0)).where(above >= 0, -1)
        return depth, above >= 0

    @property
    def depth(self) -> Int[Tensor, "rows node"]:
        """The depth of every node; 0 for the root. Nodes deeper than the bound get the bound."""
        return self._depths[0]

    @property
    def deeper(self) -> Bool[Tensor, "rows node"] | None:
        """Marks nodes deeper than ``max_depth``, which only padding may be; None if the bound was derived."""
        return self._depths[1]

    @cached_property
    def ancestors(self) -> Bool[Tensor, "rows node node"]:
        """``ancestors[b, i, j]``: node j is node i or above it, so that node i sees it.

        The chain 0 - 1 - 2 with a second child 3 of node 1::

            parents    -1 0 1 1
            ancestors  1 0 0 0
                       1 1 0 0
                       1 1 1 0
                       1 1 0 1
        """
        if self._tables is not None:
            return self._tables.ancestors
        rows, nodes = self.parents.shape
        marks = torch.eye(nodes, dtype=torch.bool, device=self.parents.device).repeat(rows, 1, 1)
        above = self.parents.clamp(min=0)
        for _ in range(self.max_depth):
            marks.scatter_(2, above[..., None], True)
            above = self.parents.gather(1, above).clamp(min=0)
        return marks

    @cached_property
    def paths(self) -> Int[Tensor, "rows node depth"]:
        """The nodes from the root's child down to every node, -1 padded: [1, 3] for node 3 in the tree above."""
        rows, nodes = self.parents.shape
        with torch.inference_mode(False):  # tables of static shapes outlive the round that asks for them first
            index = torch.arange(nodes, device=self.parents.device)
            # Every depth has at most one node of a path. The root and all other nodes go to a column that is cut off.
            column = self.depth[:, None] * self.ancestors
            paths = torch.full((rows, nodes, self.max_depth + 1), -1, dtype=torch.long, device=self.parents.device)
            return paths.scatter_(2, column, index.expand(rows, nodes, -1))[..., 1:]

    def rows(self, part: slice) -> "Topology":
        deeper = None if self.deeper is None else self.deeper[part]
        parents = self.parents[part]
        return replace(self, parents=parents, given=Tables(parents, self.depth[part], self.ancestors[part], deeper))

    @cached_property
    def ancestor_words(self) -> Int[Tensor, "rows node word"]:
        """``ancestors`` with 64 of a node's marks packed into each number, the first mark in the lowest bit."""
        if self._tables is not None and self._tables.ancestor_words is not None:
            return self._tables.ancestor_words
        marks = nn.functional.pad(self.ancestors, (0, -self.width % 64)).unflatten(2, (-1, 64))
        # Every bit once, so that adding is the same as combining; the highest bit is the sign.
        return (marks.long() << torch.arange(64, device=marks.device)).sum(-1)

    def first(self, count: int) -> "Topology":
        """Returns the topology of the first ``count`` nodes; a parent stands before its children, so it is complete."""
        if count == self.width:
            return self
        parents = self.parents[:, :count]
        given = Tables(parents, self.depth[:, :count], self.ancestors[:, :count, :count])
        return replace(self, parents=parents, given=given)


def check_bound(holds: Bool[Tensor, "..."], message: str) -> None:
    """Refuse a bound that does not hold everywhere; on a GPU by an assertion on the device, so that nobody waits."""
    if can_look(holds):
        if not holds.all():
            raise ValueError(message)
    else:
        torch._assert_async(holds.all(), message)


def _deepest(parents: Int[Tensor, "rows node"]) -> int:
    depth, above = 0, parents
    while (above > 0).any():
        depth += 1
        above = parents.gather(1, above.clamp(min=0)).where(above >= 0, -1)
    return depth + bool((above == 0).any())


def _most_children(parents: Int[Tensor, "rows node"]) -> int:
    rows, nodes = parents.shape
    counts = torch.zeros(rows, nodes, dtype=torch.long, device=parents.device)
    return int(counts.scatter_add_(1, parents.clamp(min=0), (parents >= 0).long()).max())


_MOST_KEPT = 256  # nodes of the longest chains that are kept: the marks of those up to here have 6 MB in all


def _new_chain(width: int, device: torch.device) -> Topology:
    with torch.inference_mode(False):
        index = torch.arange(width, device=device)[None]
        # The chain of a prompt's chunk is long, and so would be loops over its depth.
        tables = Tables(index - 1, index, index[:, :, None] >= index[:, None, :])
        return Topology(tables.parents, width - 1, min(width - 1, 1), in_line=True, static=True, given=tables)


_short_chain = lru_cache(maxsize=1024)(_new_chain)
