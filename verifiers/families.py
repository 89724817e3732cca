"""Look-ups that the rules share: rows of a table, probabilities of tokens, and nodes with their children."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Float, Int, Int8, Shaped
from torch import Tensor

from specdec.tree import DraftTree
from specdec.types import DraftSampling
from verifiers.groups import Group, groups_of
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
    above = groups_of(tree.topology).above if tree.topology.static else tree.parents.clamp(min=0)
    return torch.add(tree.tokens, above, alpha=vocab)


def _row_index(nodes: Int[Tensor, "batch ..."], width: int) -> Int[Tensor, " row"]:
    """Returns where the nodes stand in a table whose batch and node axes (of this width) are flattened."""
    if nodes.shape[0] == 1:
        return nodes.flatten()
    return (nodes + _first_rows(nodes.shape[0], width, nodes.device).view(-1, *[1] * (nodes.ndim - 1))).flatten()


@lru_cache(maxsize=1024)
def _first_rows(batch: int, width: int, device: torch.device) -> Int[Tensor, " batch"]:
    """Returns where every batch row begins in a table whose batch and node axes are flattened; made once."""
    with torch.inference_mode(False):
        return torch.arange(0, batch * width, width, device=device)


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
    def of_parents(
        cls, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"], *, gaps: bool = False
    ) -> "Family":
        """Returns the nodes that have children; other nodes may fill up the rows. Arguments as for ``of_group``."""
        if tree.topology.static and tree.width > 1:
            return cls.of_group(tree, target_probs, groups_of(tree.topology).parents, gaps=gaps)
        has_children = (tree.children >= 0).any(-1)
        # A look at the number would make the host wait: all nodes but the last may have children.
        return cls(tree, target_probs, has_children.byte().topk(max(tree.width - 1, 1), dim=1).indices)

    @classmethod
    def of_group(
        cls, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"], group: Group, *, gaps: bool = False
    ) -> "Family":
        """Returns nodes of a static shape.

        Args:
            tree: The tree.
            target_probs: p at every node of the tree.
            group: The nodes.
            gaps: Whether invalid siblings may stand before valid ones, with the law -1; otherwise valid ones move up.
        """
        family = cls(tree, target_probs, group.nodes.expand(len(tree.tokens), -1))
        vars(family)["_group"] = group
        vars(family)["_moved"] = not (gaps or tree.is_whole or group.children.shape[1] == 1)
        return family

    @cached_property
    def index(self) -> Int[Tensor, "batch some rank"]:
        """The children in sibling order; 0, the root, where there is none."""
        group = self._group
        if group is None:
            return self._only_child[1] if self._one_child else self._children.clamp(min=0)
        if self._moved:
            return self.tree.children.index_select(1, group.nodes)[..., : group.children.shape[1]].clamp(min=0)
        return group.children.expand(len(self.nodes), -1, -1)

    @cached_property
    def exists(self) -> Bool[Tensor, "batch some rank"]:
        """True where there is a valid child."""
        return self.laws >= 0

    def of_children(self, values: Shaped[Tensor, "batch node"]) -> Shaped[Tensor, "batch some rank"]:
        """Returns the children's values; the root's where there is no child."""
        if self._group is not None and not self._moved:
            return values.index_select(1, self._group.children.flatten()).view(self.index.shape)
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
        """How the children were drawn (``DraftSampling``); -1 where there is no valid child."""
        return self.of_children(drafted_laws(self.tree))

    @cached_property
    def p(self) -> Float[Tensor, "batch some vocab"]:
        """The target's distribution at the nodes."""
        return self._rows(self.target_probs)

    @cached_property
    def q(self) -> Float[Tensor, "batch some vocab"]:
        """The draft's distribution at the nodes; any numbers where the tree has none (all nodes are deterministic)."""
        if self.tree.draft_probs is None:
            return self.p
        return self._rows(self.tree.draft_probs).to(self.target_probs.dtype)

    def drawn_from(self) -> Iterator[Float[Tensor, "batch some vocab"]]:
        """Yields for every rank what the children of that rank were drawn from.

        That is q for an ``IID`` child, and q without the tokens of its valid earlier siblings, normalized, for one
        drawn ``WITHOUT_REPLACEMENT``; any numbers for a deterministic one.
        """
        left, only = self.q, self.tree.only_law
        for rank in range(self.index.shape[-1]):
            if rank == 0 or only is DraftSampling.IID:
                yield self.q
                continue
            left = without(left, self.tokens[..., rank - 1], self.exists[..., rank - 1])
            if only is DraftSampling.WITHOUT_REPLACEMENT:
                yield left
            else:
                yield self.q.where((self.laws[..., rank] == DraftSampling.IID)[..., None], left)

    @property
    def sorted_group(self) -> Group | None:
        """The nodes as a group of a static shape, if they are one and its children are taken as they stand there."""
        return None if self._moved else self._group

    def _rows(self, table: Float[Tensor, "batch node vocab"]) -> Float[Tensor, "batch some vocab"]:
        """Returns the nodes' rows of a table, without a copy where they stand side by side."""
        if self._group is None:
            return _select(table, self._row, self.nodes)
        if self._group.place is not None:
            return table[:, slice(*self._group.place)]
        return table.index_select(1, self._group.nodes)

    @cached_property
    def _group(self) -> Group | None:
        return None

    @cached_property
    def _moved(self) -> bool:
        return False

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


def with_siblings(
    tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]
) -> tuple[Family, tuple[int, ...], Int[Tensor, "batch child"]] | None:
    """Returns the nodes that have several children, those with most of them first; None if there are none.

    Returns:
        The nodes; how many of them have a child of each rank; and their children, all first ones first, 0 (the root)
        where there is none.
    """
    if tree.max_children < 2:
        return None
    if tree.topology.static:
        group = groups_of(tree.topology).siblings
        if group is None:
            return None
        family = Family.of_group(tree, target_probs, group, gaps=True)
        return family, group.having, group.by_rank.expand(len(tree.tokens), -1)
    drafted = tree.width - 1
    # At most drafted // k nodes have k children.
    having = tuple(drafted // max(rank + 1, 2) for rank in range(min(tree.max_children, drafted)))
    if drafted < 2:
        return None
    nodes = (tree.children >= 0).sum(-1).topk(having[0], dim=1).indices
    family = Family(tree, target_probs, nodes)
    index = torch.cat([family.index[:, :count, rank] for rank, count in enumerate(having)], 1)
    return family, having, index


def none_before(tree: DraftTree, fails: Float[Tensor, "batch node"]) -> Float[Tensor, "batch node"]:
    """Returns the probability that no earlier sibling of each node succeeds.

    Args:
        tree: The tree.
        fails: The probability that each node fails once it is its turn; 1 for invalid nodes.
    """
    if tree.topology.static:
        earlier = groups_of(tree.topology).earlier
    else:
        earlier = (tree.parents[:, :, None] == tree.parents[:, None, :]).tril(-1)
    return torch.where(earlier, fails[:, None], 1.0).prod(-1)


def drafted_laws(tree: DraftTree) -> Int8[Tensor, "batch node"]:
    """Returns how every valid drafted node was drawn; -1 at invalid nodes and at the root. Made once per tree."""
    known = vars(tree)
    if "_drafted_laws" not in known:
        drafted = (
            tree.valid & (tree.parents >= 0)
            if not tree.topology.static
            else tree.valid & groups_of(tree.topology).drafted
        )
        known["_drafted_laws"] = torch.where(drafted, tree.law, -1)
    return known["_drafted_laws"]
