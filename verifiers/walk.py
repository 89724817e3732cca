"""The two ways through a tree, and siblings that are tried one after the other: the rules, as papers state them.

A node has the law p and a weight w: w p may be emitted below it. From the root down all weights are 1; from the leaves
to the root a node's weight is the probability, over the drafts, that something in its subtree is accepted. Its children
x_0, x_1, ... are tried in turn. What is left of w p before child r is v_r, of total mass w_r, and the child was drawn
from q_r. It gets the chance (the weight) min(1, v_r(x_r) / q_r(x_r)). If it is rejected (nothing below it is accepted),

    v_{r+1} = [v_r - q_r]+ / (Z + 1 - w_r)    with    Z = sum [v_r - q_r]+    and hence    w_{r+1} = Z / (Z + 1 - w_r).

So one formula serves all ways of drawing: q_r is one-hot for a ``DETERMINISTIC`` child, q for an ``IID`` one, and q
without the earlier siblings for one drawn ``WITHOUT_REPLACEMENT``. Siblings may mix laws. ``verifiers.thresholds`` is
faster where all nodes were drawn alike; this is what it must agree with.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Float, Int, Int8, Shaped
from torch import Tensor

from specdec.interfaces import Laws
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import DraftSampling
from verifiers.target_walk import laws_of_walk
from verifiers.trees import Nodes, chance_of, children_of, flat, law_in_post_order, law_top_down, normalized, rows_of


@dataclass(frozen=True, eq=False)
class Family:
    """Some nodes and their valid children. Nothing is looked up before it is read, and nothing twice.

    Attributes:
        target_probs: p at every node of the tree.
        nodes: The nodes, the same number in every row.
        most: None of them has more children.
        counted: Which of the nodes count; others fill up the rows, and have no children here. None if all do.
        fixed: The nodes, if they are the same in every row.
    """

    tree: DraftTree
    target_probs: Float[Tensor, "batch node vocab"]
    nodes: Int[Tensor, "batch some"]
    most: int
    counted: Bool[Tensor, "batch some"] | None = None
    fixed: Nodes | None = None

    def rows(self, table: Shaped[Tensor, "batch node _"]) -> Shaped[Tensor, "batch some _"]:
        """Return the nodes' rows of a table."""
        return rows_of(self.nodes, table)[0] if self.fixed is None else self.fixed.rows(table)

    @cached_property
    def _children(self) -> Int[Tensor, "batch some rank"]:
        children = self.rows(self.tree.children)[..., : self.most]
        return children if self.counted is None else children.where(self.counted[..., None], -1)

    @cached_property
    def exists(self) -> Bool[Tensor, "batch some rank"]:
        """True where there is a child."""
        return self._children >= 0

    @cached_property
    def index(self) -> Int[Tensor, "batch child"]:
        """The children node by node, in sibling order; 0, the root, where there is none."""
        return self._children.clamp(min=0).flatten(1)

    @cached_property
    def parents(self) -> Int[Tensor, "batch some"]:
        """The nodes that have children; -1 in the place of others."""
        return self.nodes.where(self.exists[..., 0], -1)

    @cached_property
    def tokens(self) -> Int[Tensor, "batch some rank"]:
        """The children's tokens; the root's where there is no child."""
        return self.tree.tokens.gather(1, self.index).view_as(self._children)

    @cached_property
    def laws(self) -> Int8[Tensor, "batch some rank"]:
        """How the children were drawn (``DraftSampling``); -1 where there is no child."""
        return self.tree.law.gather(1, self.index).view_as(self._children).where(self.exists, -1)

    @cached_property
    def p(self) -> Float[Tensor, "batch some vocab"]:
        """The target's distribution at the nodes."""
        return self.rows(self.target_probs)

    @cached_property
    def q(self) -> Float[Tensor, "batch some vocab"]:
        """The draft's distribution at the nodes; any numbers, even NaN, where all children are deterministic."""
        if self.tree.draft_probs is None:
            return self.p
        return self.rows(self.tree.draft_probs).to(self.target_probs.dtype)

    def drawn_from(self) -> Iterator[Float[Tensor, "batch some vocab"]]:
        """Yield for every rank what its children were drawn from: q_r, and 0 where there is no child."""
        others, only = self.q, self.tree.only_law
        for rank in range(self.most):
            if rank > 0 and only is not DraftSampling.IID:
                others = without(others, self.tokens[..., rank - 1], self.exists[..., rank - 1])
                others = others / others.sum(-1, keepdim=True).clamp_(min=torch.finfo(others.dtype).tiny)
            drawn = others
            if only is None or only is DraftSampling.DETERMINISTIC:
                law = self.laws[..., rank, None]
                one_hot = torch.zeros_like(others).scatter_(-1, self.tokens[..., rank, None], 1.0)
                drawn = self.q.where(law == DraftSampling.IID, others).where(law > DraftSampling.DETERMINISTIC, one_hot)
            yield drawn.masked_fill(~self.exists[..., rank, None], 0.0)


Tried = tuple[Float[Tensor, "batch some rank"], Float[Tensor, "batch some"], Float[Tensor, "batch some vocab"]]
"""What came of trying the children of some nodes: the chance of every child, given that its earlier siblings were
rejected (0 where there is none); and, if all were rejected, the weight that the nodes are left with, and the law of the
next token, which need not be normalized (all 0 stands for p)."""

TryChildren = Callable[[Family, Float[Tensor, "batch some"]], Tried]
"""Tries the children of some nodes that have these weights."""


def without(
    table: Float[Tensor, "*rows vocab"], token: Int[Tensor, "*rows"], some: Bool[Tensor, "*rows"]
) -> Float[Tensor, "*rows vocab"]:
    """Return distributions in which some tokens have no mass, not normalized."""
    kept = torch.where(some, 0.0, torch.inf).to(table.dtype)
    return table.scatter_reduce(-1, token[..., None], kept[..., None], "amin")


def try_in_turn(family: Family, weight: Float[Tensor, "batch some"]) -> Tried:
    """Try one child after the other, as the module's formulas say."""
    left, chances = weight[..., None] * family.p, []
    for rank, drawn in enumerate(family.drawn_from()):
        token = family.tokens[..., rank, None]
        chances.append(chance_of(left.gather(-1, token), drawn.gather(-1, token)))
        left = (left - drawn).clamp_(min=0)
        z = left.sum(-1, keepdim=True)
        # Added in this order, because z may be far below the precision of 1.
        left = left / (z + (1 - weight[..., None])).clamp_(min=torch.finfo(z.dtype).tiny)
        weight = left.sum(-1)
    return torch.cat(chances, -1), weight, left


def node_by_node(
    tree: DraftTree, p: Float[Tensor, "batch node vocab"]
) -> tuple[Float[Tensor, "batch node"], tuple[Int[Tensor, "batch node"], Float[Tensor, "batch node vocab"]]]:
    """Do what ``leaf_to_root`` does with ``try_in_turn``, node by node: all that a node needs stands before it.

    A table per node is far less than one per depth, rank and node that may be there.

    Returns:
        The weights that are left, the root's 1; and the nodes that have children (-1 for others), with the laws left.
    """
    weight, left, tiny = torch.ones_like(p[:, :, 0]), p.clone(), torch.finfo(p.dtype).tiny
    assert tree.draft_probs is not None, "nodes were drawn from something"
    parents = tree.parents.clamp(min=0)
    # Of every node: which stand before it below the same parent.
    before = (parents[:, :, None] == parents.where(tree.valid, -1)[:, None]).tril(-1)
    kept = torch.where(before, 0.0, torch.inf).to(p.dtype)
    for node in range(1, tree.width):
        parent, token, row = parents[:, node, None], tree.tokens[:, node, None], flat(parents[:, node], tree.width)
        mine, q = rows_of(parents[:, node], left, tree.draft_probs)
        drawn = q = q.to(p.dtype)
        if node > 1 and tree.only_law is not DraftSampling.IID:
            drawn = q.scatter_reduce(1, tree.tokens[:, 1:node], kept[:, node, 1:node], "amin")
            drawn.div_(drawn.sum(-1, keepdim=True).clamp_(min=tiny))
        if tree.only_law in (None, DraftSampling.DETERMINISTIC):
            law, one_hot = tree.law[:, node, None], torch.zeros_like(q).scatter_(1, token, 1.0)
            drawn = q.where(law == DraftSampling.IID, drawn).where(law > DraftSampling.DETERMINISTIC, one_hot)
        drawn.masked_fill_(~tree.valid[:, node, None], 0.0)
        accepted = chance_of(mine.gather(1, token), drawn.gather(1, token))
        z = mine.sub_(drawn).clamp_(min=0).sum(-1, keepdim=True)
        total = (z + (1 - weight.gather(1, parent))).clamp_(min=tiny)
        left.flatten(0, 1).index_copy_(0, row, mine.div_(total))
        weight.scatter_(1, parent, z / total)[:, node, None] = accepted
        left[:, node].mul_(accepted)
    weight.masked_fill_(~tree.valid, 0.0)[:, 0].fill_(1)  # p may be anything at invalid nodes
    return weight, (torch.arange(tree.width, device=p.device).where(tree.children[..., 0] >= 0, -1), left)


def top_down(
    tree: DraftTree,
    target_probs: Float[Tensor, "batch node vocab"],
    try_children: TryChildren = try_in_turn,
    *,
    together: bool = False,
    walks: bool = True,
) -> Laws:
    """Return the laws of a rule that decides at every node by itself which child is accepted, if any.

    A path goes down while a child is accepted. If all children of a node are rejected, the path ends there.

    Args:
        try_children: The rule. All weights are 1.
        together: Whether nodes with different numbers of children are tried together.
        walks: Whether trees without q are left to ``target_walk``, which such a rule comes down to.
    """
    if tree.max_children == 0 or (walks and tree.draft_probs is None):
        return laws_of_walk(tree, target_probs)
    chance, tried = torch.zeros_like(target_probs[:, :, 0]), []
    for family in _families(tree, target_probs, together=together):
        chances, _, left = try_children(family, torch.ones_like(family.nodes, dtype=chance.dtype))
        # Children that do not exist are written to the root, which is not read.
        chance.scatter_(1, family.index, chances.flatten(1))
        tried.append((family.parents, left))
    return Laws(law_top_down(tree, chance), lambda stop: _law_after(target_probs, tried, stop))


def leaf_to_root(
    tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"], try_children: TryChildren = try_in_turn
) -> Laws:
    """Return the laws of a rule that tries a node after everything below it: depth first, children in sibling order.

    A rule says which weights the children get, and which weight is left to the node itself if everything below it is
    rejected. The node is then accepted with that weight, the root always. The weights depend on the tree alone, so the
    last node of the path is the first success in post-order.
    """
    if tree.draft_probs is None or tree.max_children == 0:
        return laws_of_walk(tree, target_probs)
    # Where the host knows no shape. On a GPU launches cost more than tables.
    if try_children is try_in_turn and not tree.topology.static and tree.tokens.device.type == "cpu":
        chance, left = node_by_node(tree, target_probs)
        return Laws(law_in_post_order(tree, chance), lambda stop: _law_after(target_probs, [left], stop))
    chance, tried = torch.zeros_like(target_probs[:, :, 0]), []
    chance[:, 0].fill_(1)
    for family in _levels(tree, target_probs):
        below, own, left = try_children(family, chance.gather(1, family.nodes))
        # What does not exist is written to the root, which succeeds always.
        chance.scatter_(1, family.index, below.flatten(1)).scatter_(1, family.parents.clamp(min=0), own)
        chance[:, 0].fill_(1)
        tried.append((family.parents, left))
    return Laws(law_in_post_order(tree, chance), lambda stop: _law_after(target_probs, tried, stop))


def _law_after(
    target_probs: Float[Tensor, "batch node vocab"],
    tried: list[tuple[Int[Tensor, "batch _"], Float[Tensor, "batch _ vocab"]]],
    stop: Int[Tensor, " batch"],
) -> Float[Tensor, "batch vocab"]:
    """Return the law of the next token at ``stop``."""
    (p,) = rows_of(stop, target_probs)
    law, tried_here = p, torch.zeros_like(stop, dtype=torch.bool)
    for nodes, left in tried:
        here, place = (nodes == stop[:, None]).max(-1)
        law, tried_here = rows_of(place, left)[0].where(here[:, None], law), tried_here | here
    # After a leaf it is p itself, to the last bit: a row without drafts must not depend on its batch mates.
    return normalized(law, p, tried_here[:, None])


def _families(tree: DraftTree, p: Float[Tensor, "batch node vocab"], *, together: bool) -> Iterator[Family]:
    """Yield all nodes that have children, those with many apart from those with one if they are not tried together."""
    batch, most = len(tree.tokens), tree.max_children
    if tree.topology.static:
        for group, most in _groups(tree.topology, by_level=False, together=together):
            yield Family(tree, p, group.index.expand(batch, -1), most, fixed=group)
        return
    everywhere = Nodes.of(range(tree.width), tree.tokens.device)
    if together or most == 1:
        yield Family(tree, p, everywhere.index.expand(batch, -1), most, fixed=everywhere)
        return
    # A look at the numbers would make the host wait: at most half of the nodes have two children.
    nodes = (tree.children >= 0).sum(-1).argsort(1, descending=True)
    half = max((tree.width - 1) // 2, 1)
    yield Family(tree, p, nodes[:, :half], most)
    yield Family(tree, p, nodes[:, half:], 1)


def _levels(tree: DraftTree, p: Float[Tensor, "batch node vocab"]) -> Iterator[Family]:
    """Yield the nodes of every depth that have children."""
    if tree.topology.static:
        for group, most in _groups(tree.topology, by_level=True, together=False):
            yield Family(tree, p, group.index.expand(len(tree.tokens), -1), most, fixed=group)
        return
    has_children = (tree.children >= 0).any(-1)
    for depth in range(tree.max_depth):
        here = has_children & (tree.depth == depth)
        # Nodes of other depths come last. Each of these nodes has a child, and every smaller depth has a node.
        bound = 1 if depth == 0 else max((tree.width - depth) // 2, 1)
        nodes = here.byte().topk(bound, dim=1).indices
        yield Family(tree, p, nodes, tree.max_children, counted=here.gather(1, nodes))


@lru_cache(maxsize=1024)
def _groups(topology: Topology, *, by_level: bool, together: bool) -> list[tuple[Nodes, int]]:
    """Return the nodes of a static topology that have children, with their number of children, in groups."""
    children, depth = children_of(topology), topology.depth[0].tolist()
    groups: dict[tuple[int, int], list[int]] = {}
    for node, below in enumerate(children):
        if below:
            groups.setdefault((depth[node] if by_level else 0, 0 if together else len(below)), []).append(node)
    return [
        (Nodes.of(nodes, topology.parents.device), max(len(children[node]) for node in nodes))
        for _, nodes in sorted(groups.items())
    ]
