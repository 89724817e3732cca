"""Look-ups that the rules share: rows of a table, probabilities of tokens, and nodes with their children."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Int8, Shaped
from torch import Tensor

from specdec.tree import DraftTree
from specdec.types import DraftSampling
from verifiers.residuals import without


def rows_of(
    table: Float[Tensor, "batch node vocab"], nodes: Int[Tensor, "batch ..."]
) -> Float[Tensor, "batch ... vocab"]:
    """Returns a table's rows at some nodes of every batch row."""
    return _select(table, _row_index(nodes, table.shape[1]), nodes)


def entries(tree: DraftTree, vocab: int) -> Int[Tensor, "batch node"]:
    """Returns where every node's token stands in its parent's row, in a table whose node and vocab axes are flattened.

    In a vocabulary of 10, token 3 below node 2 stands at 23. The root's own entry is meaningless.
    """
    return torch.add(tree.tokens, tree.parents.clamp(min=0), alpha=vocab)


def _row_index(nodes: Int[Tensor, "batch ..."], width: int) -> Int[Tensor, " row"]:
    """Returns where the nodes stand in a table whose batch and node axes (of this width) are flattened."""
    if nodes.shape[0] == 1:
        return nodes.flatten()
    offsets = torch.arange(0, nodes.shape[0] * width, width, device=nodes.device)
    return (nodes + offsets.view(-1, *[1] * (nodes.ndim - 1))).flatten()


def _select(
    table: Float[Tensor, "batch node vocab"], row: Int[Tensor, " row"], nodes: Int[Tensor, "batch ..."]
) -> Float[Tensor, "batch ... vocab"]:
    # index_select copies whole rows; gather would read an index per entry.
    return table.flatten(0, 1).index_select(0, row).view(*nodes.shape, -1)


@dataclass(frozen=True, eq=False)
class Family:
    """Some nodes and their children. Nothing is looked up before it is read, and nothing twice.

    Attributes:
        tree: The tree.
        target_probs: p at every node of the tree.
        nodes: The nodes, the same number in every row.
    """

    tree: DraftTree
    target_probs: Float[Tensor, "batch node vocab"]
    nodes: Int[Tensor, "batch some"]

    @classmethod
    def of_parents(cls, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> "Family":
        """Returns the nodes that have children; other nodes fill up the rows."""
        has_children = (tree.children >= 0).any(-1)
        # On the host a look at the number is free; elsewhere it would synchronize.
        some = int(has_children.sum(-1).amax()) if has_children.device.type == "cpu" else tree.width - 1
        return cls(tree, target_probs, has_children.byte().topk(max(some, 1), dim=1).indices)

    @cached_property
    def index(self) -> Int[Tensor, "batch some rank"]:
        """The valid children in sibling order; 0, the root, where there is none."""
        return self._only_child[1] if self._one_child else self._children.clamp(min=0)

    @cached_property
    def exists(self) -> Bool[Tensor, "batch some rank"]:
        """True where there is a child."""
        return self._only_child[0] if self._one_child else self._children >= 0

    def of_children(self, values: Shaped[Tensor, "batch node"]) -> Shaped[Tensor, "batch some rank"]:
        """Returns the children's values; the root's where there is no child."""
        return values.gather(1, self.flat_index).view_as(self.index)

    @cached_property
    def flat_index(self) -> Int[Tensor, "batch child"]:
        """``index`` with one line per row of the batch."""
        return self.index.flatten(1)

    @cached_property
    def tokens(self) -> Int[Tensor, "batch some rank"]:
        """The children's tokens; any token where there is no child."""
        return self.of_children(self.tree.tokens)

    @cached_property
    def laws(self) -> Int8[Tensor, "batch some rank"]:
        """How the children were drawn (``DraftSampling``); -1 where there is no child."""
        return self.of_children(self.tree.law).where(self.exists, -1)

    @cached_property
    def p(self) -> Float[Tensor, "batch some vocab"]:
        """The target's distribution at the nodes."""
        return _select(self.target_probs, self._row, self.nodes)

    @cached_property
    def q(self) -> Float[Tensor, "batch some vocab"]:
        """The draft's distribution at the nodes; any numbers where the tree has none (all nodes are deterministic)."""
        if self.tree.draft_probs is None:
            return self.p
        return _select(self.tree.draft_probs, self._row, self.nodes).to(self.target_probs.dtype)

    def drawn_from(self) -> Iterator[Float[Tensor, "batch some vocab"]]:
        """Yields for every rank what the children of that rank were drawn from.

        That is q for an ``IID`` child, and q without the tokens of its earlier siblings, normalized, for one drawn
        ``WITHOUT_REPLACEMENT``; any numbers for a deterministic one.
        """
        left = self.q
        for rank in range(self.tree.max_children):
            if rank == 0:
                yield self.q
            else:
                left = without(left, self.tokens[..., rank - 1])
                yield self.q.where((self.laws[..., rank] == DraftSampling.IID)[..., None], left)

    @property
    def _one_child(self) -> bool:
        # Cheaper than the table of all children, which a chain does not need otherwise.
        return self.tree.max_children == 1 and self.nodes.shape[1] == 1

    @cached_property
    def _only_child(self) -> tuple[Bool[Tensor, "batch 1 1"], Int[Tensor, "batch 1 1"]]:
        """Where the only node has a child, and the child; 0 where it has none."""
        exists, child = ((self.tree.parents == self.nodes) & self.tree.valid)[:, None].max(dim=-1, keepdim=True)
        return exists, child

    @cached_property
    def _children(self) -> Int[Tensor, "batch some rank"]:
        return self.tree.children.gather(1, self.nodes[..., None].expand(-1, -1, self.tree.max_children))

    @cached_property
    def _row(self) -> Int[Tensor, " row"]:
        return _row_index(self.nodes, self.tree.width)
