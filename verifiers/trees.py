"""Look-ups in tables of nodes, and the laws that follow from the chances of all nodes of a tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from specdec.topology import Topology
from specdec.tree import DraftTree


def rows_of(nodes: Int[Tensor, "batch ..."], *tables: Shaped[Tensor, "batch node _"]) -> list[Tensor]:
    """Return the rows of some tables at some nodes of every batch row."""
    row = flat(nodes, tables[0].shape[1])
    # index_select copies whole rows; gather would read an index per entry.
    return [table.flatten(0, 1).index_select(0, row).view(*nodes.shape, -1) for table in tables]


def flat(nodes: Int[Tensor, "batch ..."], width: int) -> Int[Tensor, " flat"]:
    """Return where nodes stand in a table of ``width`` nodes per row whose batch and node axes are flattened."""
    if len(nodes) > 1:
        nodes = nodes + _first_rows(len(nodes), width, nodes.device).view(-1, *[1] * (nodes.ndim - 1))
    return nodes.flatten()


@lru_cache(maxsize=1024)
def _first_rows(batch: int, width: int, device: torch.device) -> Int[Tensor, " batch"]:
    """Return where every batch row begins in a table whose batch and node axes are flattened; made once."""
    with torch.inference_mode(False):
        return torch.arange(0, batch * width, width, device=device)


@dataclass(frozen=True, eq=False)
class Nodes:
    """Some nodes of a static shape, the same in every row.

    Attributes:
        place: Where they stand if they stand side by side.
    """

    index: Int[Tensor, " some"]
    place: slice | None

    @classmethod
    def of(cls, nodes: Sequence[int], device: torch.device) -> "Nodes":
        """Return nodes by their numbers. They are made once, so that a recorded round may use them."""
        return _nodes(tuple(nodes), device)

    def rows(self, table: Shaped[Tensor, "batch node *rest"]) -> Shaped[Tensor, "batch some *rest"]:
        """Return the rows of a table at these nodes, without a copy where they stand side by side."""
        return table.index_select(1, self.index) if self.place is None else table[:, self.place]


@lru_cache(maxsize=4096)
def _nodes(nodes: tuple[int, ...], device: torch.device) -> Nodes:
    side_by_side = bool(nodes) and nodes == tuple(range(nodes[0], nodes[0] + len(nodes)))
    return Nodes(constant(nodes, device), slice(nodes[0], nodes[0] + len(nodes)) if side_by_side else None)


def constant(values: Sequence | float, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Return a tensor that outlives the round in which it is made."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def children_of(topology: Topology) -> list[list[int]]:
    """Return the children of every node of a static topology; the host looks at the parents."""
    parents = topology.parents[0].tolist()
    return [[child for child, parent in enumerate(parents) if parent == node] for node in range(len(parents))]


def entries(tree: DraftTree, vocab: int) -> Int[Tensor, "batch node"]:
    """Return where every node's token stands in its parent's row, in a table whose node and vocab axes are flattened.

    In a vocabulary of 10, token 3 below node 2 stands at 23. The root's own entry is meaningless.
    """
    above = _above(tree.topology) if tree.topology.static else tree.parents.clamp(min=0)
    return torch.add(tree.tokens, above, alpha=vocab)


@lru_cache(maxsize=1024)
def _above(topology: Topology) -> Int[Tensor, " node"]:
    with torch.inference_mode(False):
        return topology.parents[0].clamp(min=0)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Which nodes have a part in the law of which: tables over pairs of nodes.

    Attributes:
        parents: The parent of every node.
        ancestors: ``ancestors[b, i, j]``: node j is node i or above it.
    """

    parents: Int[Tensor, "rows node"]
    ancestors: Bool[Tensor, "rows node node"]

    @classmethod
    def of(cls, tree: DraftTree) -> "Pairs":
        """Return the pairs of a tree; those of a static topology are made once."""
        return _static(tree.topology) if tree.topology.static else cls(tree.parents, tree.ancestors)

    @cached_property
    def left_of_path(self) -> Float[Tensor, "rows node node"]:
        """Positive where j is an earlier sibling of i or of a node above i."""
        earlier = (self.parents[:, :, None] == self.parents[:, None, :]).tril(-1)
        # Sums of ones and zeros, so exact; booleans have no matrix product.
        return self.ancestors.float() @ earlier.float()

    @cached_property
    def no_factor(self) -> Bool[Tensor, "rows node 2 node"]:
        """``[b, i, 0, j]``: accepting j has no part in a path that ends at i; ``[b, i, 1, j]``: nor has rejecting j.

        From the root down, such a path is made by accepting i and each node above it but the root, and by rejecting
        their earlier siblings and the children of i.
        """
        index = torch.arange(self.parents.shape[1], device=self.parents.device)
        accepted = self.ancestors & (index > 0)
        rejected = (self.left_of_path > 0) | (self.parents[:, None] == index[:, None])
        return ~torch.stack([accepted, rejected], 2)

    @cached_property
    def not_before(self) -> Bool[Tensor, "rows node node"]:
        """Whether j comes after i, or is i, in post-order.

        In the chain 0 - 1 - 2 with a second child 3 of node 1, that order is 2, 3, 1, 0.
        """
        below = self.ancestors.transpose(1, 2)
        before = (self.left_of_path @ below.float() > 0) | below.triu(1)
        return ~before


@lru_cache(maxsize=1024)
def _static(topology: Topology) -> Pairs:
    with torch.inference_mode(False):
        pairs = Pairs(topology.parents, topology.ancestors)
        _ = pairs.no_factor, pairs.not_before
    return pairs


def law_top_down(tree: DraftTree, chance: Float[Tensor, "batch node"]) -> Float[Tensor, "batch node"]:
    """Return the law of the last node of a path that goes down while a child is accepted.

    Args:
        chance: The probability of accepting each node, given that its parent and none of its earlier siblings was
            accepted; 0 at invalid nodes. The root's is not read.
    """
    one, sign = _complement(chance.device)
    # Every node is accepted or rejected; the law is a product of some of these probabilities.
    both = torch.addcmul(one, chance[:, None], sign)
    return both[:, None].masked_fill(Pairs.of(tree).no_factor, 1.0).flatten(2).prod(-1)


@lru_cache
def _complement(device: torch.device) -> tuple[Float[Tensor, "2 1"], Float[Tensor, "2 1"]]:
    """Return numbers a and b such that ``a + b c`` is c and 1 - c."""
    return constant([[0.0], [1.0]], device, torch.float32), constant([[1.0], [-1.0]], device, torch.float32)


def law_in_post_order(tree: DraftTree, chance: Float[Tensor, "batch node"]) -> Float[Tensor, "batch node"]:
    """Return the law of the first success in post-order: a node follows everything below it and left of it.

    The chance that a node succeeds once it is its turn is 1 for the root and 0 for invalid nodes.
    """
    failure = (1 - chance).clamp(min=0)  # a chance of 1 may have been rounded up
    return chance * failure[:, None].masked_fill(Pairs.of(tree).not_before, 1.0).prod(-1)


def normalized(
    weights: Float[Tensor, "*rows vocab"],
    fallback: Float[Tensor, "*rows vocab"],
    condition: Bool[Tensor, "*rows 1"] | None = None,
) -> Float[Tensor, "*rows vocab"]:
    """Return weights scaled to sum to 1; the fallback where they are all 0 (or NaN) or the condition is false."""
    total = weights.sum(-1, keepdim=True)
    usable = total > 0
    if condition is not None:
        usable &= condition
    return (weights / total).where(usable, fallback)


def chance_of(mass: Float[Tensor, "*rows"], drawn: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """Return min(1, mass / drawn), and 0 where ``drawn`` is 0."""
    return torch.minimum(mass, drawn) / drawn.clamp(min=torch.finfo(drawn.dtype).tiny)


def ratios(
    p: Float[Tensor, "batch depth vocab"], q: Float[Tensor, "batch depth vocab"], tokens: Int[Tensor, "batch depth"]
) -> Float[Tensor, "batch depth"]:
    """Return q / p of the tokens of a chain."""
    return (q.gather(2, tokens[..., None]) / p.gather(2, tokens[..., None]))[..., 0]
