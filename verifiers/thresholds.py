"""Rejection of drawn siblings by one number per node: the fast path of ``walk.try_in_turn``, for all nodes at once.

It serves trees of a static shape whose nodes were all drawn by one law. A node has the law p and the weight w, which is
1 at all nodes for rules that go down from the root. Its children x_0, x_1, ... were drawn from q, independently or
without replacement, and are tried in turn. What is left of w p before child r, not normalized, is u_r, and t_r is its
total mass plus 1 - w. The child was drawn with the probability q(x_r) / m_r, where m_r is what the earlier siblings
leave of q: 1 for independent ones. Its chance is min(1, u_r(x_r) / (s_r q(x_r))) with s_r = t_r / m_r, and if it is
rejected,

    u_{r+1} = [u_r - s_r q]+ = [w p - c_{r+1} q]+    with    c_{r+1} = s_0 + ... + s_r.

Without replacement, q is no longer drawn from at the tokens of earlier siblings, so u should stay what it is there. But
it is 0 there, and stays 0: a child is rejected, and so is everything below it, only if u_r(x_r) < s_r q(x_r). So the
formula holds for every draft and every rank that is reached.

So a table over the vocabulary serves only to find s_r, and a rank takes one product, one maximum and one sum, for many
nodes together. Everything else is arithmetic on a few numbers per node. If nothing is left of p, later siblings are
not accepted, and the next token is drawn from p; this has the probability 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.interfaces import Laws
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import DraftSampling
from verifiers.trees import Nodes, children_of, constant, entries, law_in_post_order, law_top_down, rows_of

_LEAST = 1e-30  # of a mass that is divided by; some quotients can still be added


def has_thresholds(tree: DraftTree) -> bool:
    """Return whether the host knows the tree's shape, and that all its nodes were drawn by one law."""
    drawn = tree.only_law in (DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT)
    return drawn and tree.topology.static and tree.draft_probs is not None and tree.max_children > 0


def laws_by_thresholds(tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"], *, leaf_to_root: bool) -> Laws:
    """Return the laws of a tree that ``has_thresholds``, as ``walk.leaf_to_root`` or ``walk.top_down`` do."""
    chance, after = (_on_chains if tree.in_line else _on_trees)(tree, target_probs, leaf_to_root)
    if not leaf_to_root:
        return Laws(law_top_down(tree, chance), lambda stop: _law_after(tree, target_probs, stop, after, None))
    assert tree.draft_probs is not None, "nodes were drawn from something"
    parents, weight = _plan(tree.topology, True).parents, chance
    p, q = parents.rows(target_probs), parents.rows(tree.draft_probs).to(target_probs.dtype)
    came = parents.rows(weight)
    z = (p * came[..., None]).addcmul_(q, parents.rows(after)[..., None], value=-1).clamp_(min=0).sum(-1)
    own = z / (z + (1 - came)).clamp_(min=torch.finfo(z.dtype).tiny)
    if not tree.is_whole:  # without children, a node keeps what it came with
        own = torch.where(parents.rows(after) > 0, own, came)
    chance = weight.index_copy(1, parents.index, own)
    chance[:, 0].fill_(1)
    return Laws(law_in_post_order(tree, chance), lambda stop: _law_after(tree, target_probs, stop, after, weight))


def _law_after(
    tree: DraftTree,
    target_probs: Float[Tensor, "batch node vocab"],
    stop: Int[Tensor, " batch"],
    after: Float[Tensor, "batch node"],
    weight: Float[Tensor, "batch node"] | None,
) -> Float[Tensor, "batch vocab"]:
    """Return N([w p - c q]+) at ``stop``; p itself, to the last bit, where no child was tried."""
    assert tree.draft_probs is not None, "nodes were drawn from something"
    c = after.gather(1, stop[:, None])
    p, q = rows_of(stop, target_probs, tree.draft_probs)
    mass = p if weight is None else p * weight.gather(1, stop[:, None])
    left = torch.addcmul(mass, q.to(p.dtype), c, value=-1).clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    # A leaf's q may be anything, even NaN; a comparison with NaN is false.
    return (left / total).where(torch.minimum(total, c) > 0, p)


_Found = tuple[Float[Tensor, "batch node"], Float[Tensor, "batch node"]]
"""The chance of every node, given that its parent was reached and its earlier siblings were rejected (0 at invalid
nodes); and c at every node after all of its children were rejected, 0 where there are none."""


def _of_tokens(
    tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]
) -> tuple[Float[Tensor, "batch node"], Float[Tensor, "batch node"], Bool[Tensor, "batch node"] | None]:
    """Return p / q and q of every node's token at its parent, and which nodes are drafted; None for all but the root.

    q is 0 where a node is not drafted; the ratio is NaN or infinite where q is 0, as a token that q excludes is not
    accepted. The root's numbers mean nothing.
    """
    assert tree.draft_probs is not None, "nodes were drawn from something"
    entry, drafted = entries(tree, target_probs.shape[2]), None
    q = tree.draft_probs.flatten(1).gather(1, entry).to(target_probs.dtype)
    if not tree.is_whole:
        drafted = tree.valid & _plan(tree.topology, True).drafted
        q = q * drafted
    return target_probs.flatten(1).gather(1, entry) / q, q, drafted


def _on_chains(tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"], leaf_to_root: bool) -> _Found:
    """Try all nodes of chains.

    From the leaf to the root, the weights are w_0 = 1 and w_i = min(1, w_{i-1} p_i / q_i). With the products r_i of all
    ratios up to i, w_i is r_i over the largest of r_0 = 1, ..., r_i. The products are summed as logarithms, in float64,
    because they may be out of range.
    """
    chance, _, drafted = _of_tokens(tree, target_probs)
    chance.nan_to_num_(nan=0.0, posinf=0.0)
    if leaf_to_root:
        chance[:, 0].fill_(1)
        product = chance.log_().cumsum(-1, dtype=torch.float64)
        chance = (product - product.cummax(-1).values).exp_().to(target_probs.dtype)
    else:
        chance = chance.clamp_(max=1)
    if drafted is None:
        return chance, _plan(tree.topology, True).has_child.to(chance.dtype).expand_as(chance)
    return chance, torch.nn.functional.pad(drafted[:, 1:].to(chance.dtype), (0, 1))


def _on_trees(tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"], leaf_to_root: bool) -> _Found:
    """Try all nodes: level by level from the root down if they have weights, otherwise all together."""
    plan = _plan(tree.topology, leaf_to_root)
    ratio, q, drafted = _of_tokens(tree, target_probs)
    exists = None if drafted is None else plan.last_first.rows(drafted).view(len(q), *plan.start[1:].shape)
    masses = None
    if tree.only_law is DraftSampling.WITHOUT_REPLACEMENT:
        several = exists
        if drafted is not None and leaf_to_root:  # from the root down, these nodes come first in the table of all
            several = plan.siblings_last_first.rows(drafted).view(len(q), *plan.siblings_exist.shape)
        masses = _masses_left(tree, plan, q, None if several is None else several[..., : plan.siblings_exist.shape[1]])
    # s at all ranks, and its sums; before rank 0 stands a row of zeros.
    both = q.new_empty(len(q), 2, *plan.start.shape)
    both[:, 0] = plan.start
    if exists is not None:
        both[:, 0, 1] = exists[:, -1]
    weight, after = torch.empty_like(q), q
    if leaf_to_root:
        weight[:, 0].fill_(1)
        ratio.nan_to_num_(nan=0.0, posinf=0.0)
    for level in plan.levels:
        steps = both[:, 0, :, level.columns]
        value = level.above.rows(weight) * ratio[:, level.place] if leaf_to_root else ratio[:, level.place]
        if level.siblings is None:
            torch.clamp(value, max=1, out=weight[:, level.place])
            continue
        some = None if exists is None else exists[..., level.columns]
        _fill(steps, tree, target_probs, level, some, masses, level.siblings.rows(weight) if leaf_to_root else None)
        torch.cumsum(steps, 1, out=both[:, 1, :, level.columns])
        before, taken, after = both.flatten(1).index_select(1, level.picks).split(level.sizes, 1)
        value = value.sub(before).div_(taken).nan_to_num_(nan=0.0, posinf=0.0)
        torch.clamp(value, min=0, max=1, out=weight[:, level.place])
    if leaf_to_root:  # levels of single children have no sums yet
        torch.cumsum(both[:, 0], 1, out=both[:, 1])
        after = both.flatten(1).index_select(1, plan.ends)
    return weight, after


def _fill(
    steps: Float[Tensor, "batch rank1 some"],
    tree: DraftTree,
    target_probs: Float[Tensor, "batch node vocab"],
    level: "_Level",
    exists: Bool[Tensor, "batch rank some"] | None,
    masses: Float[Tensor, "batch left several"] | None,
    weight: Float[Tensor, "batch several_here"] | None,
) -> None:
    """Write s at all ranks but the first, for nodes with several children, those with most of them first.

    ``exists`` and ``masses`` have the last rank first; None if all children exist, or are independent.
    """
    assert level.siblings is not None and tree.draft_probs is not None
    left = level.siblings.rows(target_probs)
    q_rows = level.siblings.rows(tree.draft_probs).to(left.dtype)
    left = left if weight is None else left * weight[..., None]
    for rank, count in enumerate(level.counts, 1):
        left = left[:, :count]
        subtract = left.addcmul if rank == 1 and weight is None else left.addcmul_
        left = subtract(q_rows[:, :count], steps[:, rank, :count, None], value=-1).clamp_(min=0)
        taken = steps[:, rank + 1, :count]
        torch.sum(left, -1, out=taken)
        if weight is not None:
            taken.add_(1 - weight[:, :count])
        if masses is not None:
            taken.div_(masses[:, -1 - rank, level.places][:, :count])
        elif exists is not None:
            taken.mul_(exists[:, -1 - rank, :count])


def _masses_left(
    tree: DraftTree, plan: "_Plan", q: Float[Tensor, "batch node"], exists: Bool[Tensor, "batch rank several"] | None
) -> Float[Tensor, "batch left several"]:
    """Return how much of q every sibling's earlier siblings leave, the last rank first; infinity for no sibling.

    Masses are summed from the small numbers to the large ones: what is left of q may be far below the precision of 1.

    ``q`` is that of every node's token, 0 where it is not drafted; ``exists`` is None if all of the shape do.
    """
    assert tree.draft_probs is not None, "nodes were drawn from something"
    several, whole, shape = plan.siblings_last_first, exists is None, plan.siblings_exist.shape
    drawn = several.rows(q).view(len(q), *shape)
    if exists is None:
        exists = plan.siblings_exist
        drawn = drawn if plan.even else drawn * exists  # the root, which stands for no child, has any number
    tokens = several.rows(tree.tokens).view(len(q), *shape).transpose(1, 2)
    # A write of the smaller number: the token is gone, or, where there is no sibling, it stays.
    gone = torch.where(exists, plan.zero, plan.infinite).to(q.dtype).expand(len(q), *shape).transpose(1, 2)
    q_rows = plan.several.rows(tree.draft_probs).to(q.dtype)
    others = q_rows.scatter_reduce(-1, tokens, gone, "amin").sum(-1)
    masses = torch.cat([others[:, None], drawn], 1).cumsum(1)
    if whole:
        # Where nothing is left of q, the next step removes everything that could have been drawn, which is 0 already.
        masses = masses.clamp_(min=_LEAST)
        if plan.even:
            return masses
    return torch.where(exists, masses[:, 1:], plan.infinite)


@dataclass(frozen=True, eq=False)
class _Level:
    """Nodes that have children, and these children, which stand side by side.

    Attributes:
        columns: Where the nodes stand in ``_Plan.parents``; those with most children come first.
        place: The children.
        above: Their parents.
        siblings: The nodes with several children; None if there are none.
        counts: How many of the nodes have a second child, a third one, and so on.
        places: Where ``siblings`` stand in ``_Plan.several``.
        picks: Where s stands for every child in the table of both kinds, flattened: summed up to its turn, and at it;
            and, where all nodes are tried together, ``_Plan.ends``.
        sizes: How many numbers each of these three are.
    """

    columns: slice
    place: slice
    above: Nodes
    siblings: Nodes | None
    counts: tuple[int, ...]
    places: slice
    picks: Int[Tensor, " place"]
    sizes: tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class _Plan:
    """How the nodes of a static shape are tried.

    Attributes:
        levels: The nodes that have children: depth by depth, or all together.
        parents: The same nodes, one level after the other.
        last_first: Their children of each rank, last rank first; 0, the root, where there is none.
        start: 1 for every node's first child, 0 for what comes before it and for later children.
        ends: Where the sum of s after all children of a node stands in the table of both kinds, flattened.
        several: The nodes with several children.
        siblings_last_first: As ``last_first``, of these.
        siblings_exist: Where there is such a child.
        even: Whether all of these nodes have equally many children.
        drafted: Which nodes are drafted: all but the root.
        zero: 0, on the device. A number from Python would be copied there in every round.
    """

    levels: tuple[_Level, ...]
    parents: Nodes
    last_first: Nodes
    start: Float[Tensor, "rank1 some"]
    ends: Int[Tensor, " node"]
    several: Nodes
    siblings_last_first: Nodes
    siblings_exist: Bool[Tensor, "rank several"]
    even: bool
    drafted: Bool[Tensor, " node"]
    has_child: Bool[Tensor, " node"]
    zero: Float[Tensor, ""]
    infinite: Float[Tensor, ""]


@lru_cache(maxsize=1024)
def _plan(topology: Topology, by_level: bool) -> _Plan:
    """Return how a static topology is tried; made once, so that no round looks at parents or copies an index."""
    children, depth, device = children_of(topology), topology.depth[0].tolist(), topology.parents.device
    rank_of = {child: rank for below in children for rank, child in enumerate(below)}
    parent_of = {child: node for node, below in enumerate(children) for child in below}
    having = sorted((node for node in rank_of.keys() | {0} if children[node]), key=lambda node: -len(children[node]))
    depths = sorted({depth[node] for node in having}) if by_level else [0]
    by_depth = [[node for node in having if depth[node] == level or not by_level] for level in depths]
    in_turn = [node for nodes in by_depth for node in nodes]
    several = [node for node in in_turn if len(children[node]) > 1]
    ranks, column = len(children[having[0]]), {node: at for at, node in enumerate(in_turn)}

    def at(kind: int, rank: int, node: int) -> int:
        """Where the number of a rank (-1 for what comes before rank 0) stands: s (kind 0) or its sum (kind 1)."""
        return (kind * (ranks + 1) + rank + 1) * len(in_turn) + column.get(node, 0)

    def last_first(nodes: Sequence[int]) -> list[list[int]]:
        return [[(children[node] + [0] * ranks)[rank] for node in nodes] for rank in reversed(range(ranks))]

    def level(nodes: list[int]) -> _Level:
        below = sorted(child for node in nodes for child in children[node])
        assert below == list(range(below[0], below[-1] + 1)), "static shapes number their nodes level by level"
        more = [node for node in nodes if len(children[node]) > 1]
        before = [at(1, rank_of[child] - 1, parent_of[child]) for child in below]
        taken = [at(0, rank_of[child], parent_of[child]) for child in below]
        after = [] if by_level else ends
        return _Level(
            columns=slice(column[nodes[0]], column[nodes[0]] + len(nodes)),
            place=slice(below[0], below[-1] + 1),
            above=Nodes.of([parent_of[child] for child in below], device),
            siblings=Nodes.of(more, device) if more else None,
            counts=tuple(sum(len(children[n]) > rank for n in more) for rank in range(1, len(children[nodes[0]]))),
            places=slice(several.index(more[0]), several.index(more[0]) + len(more)) if more else slice(0),
            picks=constant(before + taken + after, device),
            sizes=(len(before), len(taken), len(after)),
        )

    ends = [at(1, ranks - 1 if below else -1, node) for node, below in enumerate(children)]
    flat = [child for row in last_first(in_turn) for child in row]
    siblings = last_first(several)
    exist = [[child > 0 for child in row] for row in siblings] if several else []
    return _Plan(
        levels=tuple(level(nodes) for nodes in by_depth),
        parents=Nodes.of(in_turn, device),
        last_first=Nodes.of(flat, device),
        start=constant([[float(r == 1)] * len(in_turn) for r in range(ranks + 1)], device, torch.float32),
        ends=constant(ends, device),
        several=Nodes.of(several, device),
        siblings_last_first=Nodes.of([child for row in siblings for child in row], device),
        siblings_exist=constant(exist, device, torch.bool).view(len(exist), len(several)),
        even=all(map(all, exist)),
        drafted=constant([node in rank_of for node in range(len(children))], device, torch.bool),
        has_child=constant([bool(below) for below in children], device, torch.bool),
        zero=constant(0.0, device, torch.float32),
        infinite=constant(math.inf, device, torch.float32),
    )
