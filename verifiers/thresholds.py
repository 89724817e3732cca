"""Rejection of drawn siblings by one number per node: what is left of p is [p - c q]+.

A node has the law p, and its children x_0, x_1, ... were drawn from q, independently or without replacement, and are
tried in turn. What is left of p before child r, not normalized, is u_r, of total mass t_r. The child was drawn with the
probability q(x_r) / m_r, where m_r is what the earlier siblings leave of q: 1 for independent ones. It is accepted with
the probability min(1, u_r(x_r) / (s_r q(x_r))), where s_r = t_r / m_r, and if it is rejected,

    u_{r+1} = [u_r - s_r q]+ = [p - c_{r+1} q]+    with    c_{r+1} = s_0 + ... + s_r.

Without replacement, q is no longer drawn from at the tokens of earlier siblings, so u should stay what it is there. But
it is 0 there, and stays 0: a child is rejected only if u_r(x_r) < s_r q(x_r). So the formula holds for every draft and
every rank that is reached.

So a table over the vocabulary serves only to find s_r, and a rank takes one product, one maximum and one sum, for all
nodes together. Everything else is arithmetic on a few numbers per node. If nothing is left of p, later siblings are
not accepted, and the next token is drawn from p; this has the probability 0.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.acceptance import parts_of
from specdec.tree import DraftTree
from specdec.types import DraftSampling
from verifiers.families import Family, entries
from verifiers.groups import Group, groups_of

DRAWN = (DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT)
"""The laws of drawn siblings. If the host knows that all nodes have one of these, nothing has to be done for others."""

_LEAST = 1e-30  # of a mass that is divided by; some quotients can still be added


def has_thresholds(tree: DraftTree) -> bool:
    """Returns whether the host knows the tree's shape, and that all its nodes were drawn by one law."""
    return tree.topology.static and tree.draft_probs is not None and tree.only_law in DRAWN


@dataclass(frozen=True, eq=False)
class Thresholds:
    """What came of trying all nodes.

    Attributes:
        chance: The probability of accepting each node, given that its parent and none of its earlier siblings was
            accepted; 0 at invalid nodes. The root's means nothing.
        after: c at every node after all of its children were rejected; 0 where there are none.
    """

    chance: Float[Tensor, "batch node"]
    after: Float[Tensor, "batch node"]


def thresholds(tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Thresholds:
    """Try all nodes of a tree that ``has_thresholds``."""
    assert tree.draft_probs is not None, "nodes were drawn from something"
    groups = groups_of(tree.topology)
    p, q, drafted = of_tokens(tree, target_probs)
    ratio = p / q
    if groups.siblings is None:
        chance = ratio
        exists = groups.has_child.expand_as(p) if drafted is None else drafted.index_select(1, groups.first_child)
        after = exists.to(p.dtype)
    else:
        several, masses = groups.siblings, None
        both, exists = new_steps(p, groups.parents, drafted)
        if tree.only_law is DraftSampling.WITHOUT_REPLACEMENT:
            masses = masses_left(tree, several, q, None if exists is None else exists[..., : len(several.nodes)])
        fill_steps(both[:, 0], tree, target_probs, several, exists, masses)
        torch.cumsum(both[:, 0], 1, out=both[:, 1])
        picked = both.flatten(1).index_select(1, groups.picks).unflatten(1, (3, -1))
        before, taken, after = picked.unbind(1)
        chance = (ratio - before) / taken
    # A token that q excludes is not accepted, nor is any if nothing is left of p.
    return Thresholds(chance.nan_to_num_(nan=0.0, posinf=0.0).clamp_(min=0, max=1), after)


def of_tokens(
    tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]
) -> tuple[Float[Tensor, "batch node"], Float[Tensor, "batch node"], Bool[Tensor, "batch node"] | None]:
    """Returns p and q of every node's token at its parent, and which nodes are drafted; None for all but the root.

    q is 0 where a node is not drafted. The root's numbers mean nothing.
    """
    assert tree.draft_probs is not None, "nodes were drawn from something"
    entry = entries(tree, target_probs.shape[2])
    p = target_probs.flatten(1).gather(1, entry)
    q = tree.draft_probs.flatten(1).gather(1, entry).to(p.dtype)
    if tree.is_whole:
        return p, q, None
    groups = groups_of(tree.topology)
    drafted = tree.valid & groups.drafted
    return p, q.where(drafted, groups.zero), drafted


def new_steps(
    p: Float[Tensor, "batch node"], parents: Group, drafted: Bool[Tensor, "batch node"] | None
) -> tuple[Float[Tensor, "batch 2 rank1 some"], Bool[Tensor, "batch rank some"] | None]:
    """Returns a table for s and its sums, rank by rank, with a row of zeros before rank 0; s is set at rank 0.

    Besides, it returns which children exist, the last rank first; None if all do.

    Args:
        p: Anything of the rules' dtype.
        parents: The nodes that have children.
        drafted: Which nodes are drafted; None for all but the root.
    """
    both = p.new_empty(len(p), 2, *parents.start.shape)
    both[:, 0] = parents.start
    if drafted is None:
        return both, None
    exists = drafted.index_select(1, parents.last_first.flatten()).view(len(p), *parents.last_first.shape)
    both[:, 0, 1] = exists[:, -1]
    return both, exists


def fill_steps(
    steps: Float[Tensor, "batch rank1 some"],
    tree: DraftTree,
    target_probs: Float[Tensor, "batch node vocab"],
    several: Group,
    exists: Bool[Tensor, "batch rank some"] | None,
    masses: Float[Tensor, "batch left group"] | None,
    weight: Float[Tensor, "batch group"] | None = None,
) -> None:
    """Write s at all ranks but the first.

    Args:
        steps: Where to. The nodes with several children come first, those with most of them before the others.
        tree: The tree.
        target_probs: p at every node.
        several: Those nodes.
        exists: Which children exist, the last rank first; None if all do.
        masses: What is left of q for every sibling drawn without replacement; None for independent ones.
        weight: The weights of ``several``, so much of p is to be emitted there; None if all are 1.
    """
    assert tree.draft_probs is not None, "nodes were drawn from something"
    slack = None if weight is None else 1 - weight
    for part in parts_of(len(several.nodes), target_probs[:, 0].numel()):
        p_rows, q_rows = (rows_of_group(table, several, part) for table in (target_probs, tree.draft_probs))
        q_rows = q_rows.to(p_rows.dtype)
        left = p_rows if weight is None else p_rows * weight[:, part, None]
        for rank, count in enumerate(several.having[1:], 1):
            some = min(count, part.stop) - part.start
            if some <= 0:
                break
            place = slice(part.start, part.start + some)
            now, step = left[:, :some], steps[:, rank, place, None]
            subtract = now.addcmul if left is p_rows else now.addcmul_
            left = subtract(q_rows[:, :some], step, value=-1).clamp_(min=0)
            taken = steps[:, rank + 1, place]
            torch.sum(left, -1, out=taken)
            if slack is not None:
                taken.add_(slack[:, place])
            if masses is not None:
                taken.div_(masses[:, -1 - rank, place])
            elif exists is not None:
                taken.mul_(exists[:, -1 - rank, place])


def rows_of_group(
    table: Float[Tensor, "batch node vocab"], group: Group, part: slice
) -> Float[Tensor, "batch some vocab"]:
    """Returns the rows of some of a group's nodes, without a copy where they stand side by side."""
    if group.place is not None:
        return table[:, group.place[0] + part.start : group.place[0] + part.stop]
    return table.index_select(1, group.nodes[part])


def masses_left(
    tree: DraftTree,
    several: Group,
    q: Float[Tensor, "batch node"],
    exists: Bool[Tensor, "batch rank some"] | None,
) -> Float[Tensor, "batch left some"]:
    """Returns how much of q every sibling's earlier siblings leave, the last rank first; infinity for no sibling.

    Masses are summed from the small numbers to the large ones: what is left of q may be far below the precision of 1.

    Args:
        tree: The tree.
        several: Nodes that have several children.
        q: The probability q(x) of every node's token; 0 where it is not drafted.
        exists: Which of their children exist, the last rank first; None if all do.
    """
    assert tree.draft_probs is not None, "nodes were drawn from something"
    groups, gone = groups_of(tree.topology), None  # what a write of the smaller number does to a token
    index = several.filled if exists is None else several.last_first
    tokens = tree.tokens.index_select(1, index.flatten()).view(len(q), *index.shape).transpose(1, 2)
    if exists is not None:  # an invalid sibling has any token, which must stay
        gone = torch.where(exists.transpose(1, 2), groups.zero, groups.infinite).to(q.dtype)
    masses = q.new_empty(len(q), len(index) + 1, index.shape[1])
    for part in parts_of(len(several.nodes), tree.draft_probs[:, 0].numel()):
        q_rows = rows_of_group(tree.draft_probs, several, part).to(q.dtype)
        if gone is None:
            others = q_rows.scatter(-1, tokens[:, part], 0.0)
        else:
            others = q_rows.scatter_reduce(-1, tokens[:, part], gone[:, part], "amin")
        torch.sum(others, -1, out=masses[:, 0, part])
    torch.index_select(q, 1, index.flatten(), out=masses.flatten(1)[:, index.shape[1] :])
    if exists is not None:
        return masses.cumsum(1)[:, 1:].where(exists, groups.infinite)
    if several.missing is not None:
        masses[:, 1:].masked_fill_(several.missing, 0.0)
    # Where nothing is left of q, the next step removes everything that could have been drawn, which is 0 already.
    return masses.cumsum(1).clamp_(min=_LEAST)


def law_of_next(
    tree: DraftTree,
    target_probs: Float[Tensor, "batch node vocab"],
    stop: Int[Tensor, " batch"],
    after: Float[Tensor, "batch node"],
) -> Float[Tensor, "batch vocab"]:
    """Returns N([p - c q]+) at ``stop``; p itself, to the last bit, where no child was tried.

    Args:
        tree: A tree that ``has_thresholds``.
        target_probs: p at every node.
        stop: Where the path ends.
        after: c at every node.
    """
    assert tree.draft_probs is not None, "nodes were drawn from something"
    c = after.gather(1, stop[:, None])
    here = Family(tree, target_probs, stop[:, None])
    p, q = here.p[:, 0], here.q[:, 0]
    left = torch.addcmul(p, q, c, value=-1).clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    # A leaf's q may be anything, even NaN; a comparison with NaN is false.
    return (left / total).where(torch.minimum(total, c) > 0, p)
