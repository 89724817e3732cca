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
        steps = steps_of(tree, target_probs, groups.parents, groups.siblings, q, drafted)
        picked = steps.flatten(1).index_select(1, groups.picks).unflatten(1, (3, -1))
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


def steps_of(
    tree: DraftTree,
    target_probs: Float[Tensor, "batch node vocab"],
    parents: Group,
    several: Group,
    q: Float[Tensor, "batch node"],
    drafted: Bool[Tensor, "batch node"] | None,
    weight: Float[Tensor, "batch some"] | None = None,
) -> Float[Tensor, "batch 2 rank some"]:
    """Returns s and its sums, rank by rank, with a row of zeros before rank 0.

    Args:
        tree: The tree.
        target_probs: p at every node.
        parents: Nodes that have children, those with most of them first.
        several: Those of them that have several.
        q: The probability q(x) of every node's token; 0 where it is not drafted.
        drafted: Which nodes are; None for all but the root.
        weight: The weights of ``parents``, so much of p is to be emitted there; None if all are 1. With weights, a child
            that is certain may be followed by others, so q is set to 0 at the tokens of earlier siblings.
    """
    having, swor = several.having, tree.only_law is DraftSampling.WITHOUT_REPLACEMENT
    both = target_probs.new_empty(len(q), 2, len(having) + 1, len(parents.nodes))
    steps = both[:, 0]
    steps.copy_(parents.start)
    exists = None
    if drafted is not None:
        exists = drafted.index_select(1, parents.last_first.flatten()).view(len(q), *parents.last_first.shape)
        steps[:, 1] = exists[:, -1]
    slack = None if weight is None else 1 - weight
    for part in parts_of(len(several.nodes), target_probs[:, 0].numel()):
        p_rows, q_rows = (rows_of_group(table, several, part) for table in (target_probs, tree.draft_probs))
        q_rows = q_rows.to(q.dtype)
        drawn = None
        if swor:
            drawn = _drawn(tree, several, part, q_rows, q, exists)
        left = p_rows if weight is None else p_rows * weight[:, part, None]
        for rank, count in enumerate(having[1:], 1):
            some = min(count, part.stop) - part.start
            if some <= 0:
                break
            place = slice(part.start, part.start + some)
            if drawn is not None and weight is not None and rank > 1:
                q_rows = drawn.remove(q_rows, 2 - rank - 1, some, in_place=rank > 2)
            now, step = left[:, :some], steps[:, rank, place, None]
            subtract = now.addcmul if left is p_rows else now.addcmul_
            left = subtract(q_rows[:, :some], step, value=-1).clamp_(min=0)
            taken = steps[:, rank + 1, place]
            torch.sum(left, -1, out=taken)
            if slack is not None:
                taken.add_(slack[:, place])
            if drawn is not None:
                taken.div_(drawn.masses[:, -1 - rank, :some])
            elif exists is not None:
                taken.mul_(exists[:, -1 - rank, place])
    torch.cumsum(steps, 1, out=both[:, 1])
    return both


def rows_of_group(
    table: Float[Tensor, "batch node vocab"], group: Group, part: slice
) -> Float[Tensor, "batch some vocab"]:
    """Returns the rows of some of a group's nodes, without a copy where they stand side by side."""
    if group.place is not None:
        return table[:, group.place[0] + part.start : group.place[0] + part.stop]
    return table.index_select(1, group.nodes[part])


@dataclass(frozen=True, eq=False)
class _Drawn:
    """Siblings that were drawn without replacement, the last rank first.

    Attributes:
        tokens: Their tokens.
        gone: 0 for a sibling, infinity where there is none; None if all of them exist.
        masses: How much of q every sibling's earlier siblings leave; infinity where there is no sibling.
    """

    tokens: Int[Tensor, "batch some rank"]
    gone: Float[Tensor, "batch some rank"] | None
    masses: Float[Tensor, "batch left some"]

    def remove(
        self, q_rows: Float[Tensor, "batch some vocab"], column: int, count: int, *, in_place: bool
    ) -> Float[Tensor, "batch rest vocab"]:
        """Returns q without the tokens in one column, for the first few nodes."""
        q_rows, tokens = q_rows[:, :count], self.tokens[:, :count, column, None]
        if self.gone is None:
            return q_rows.scatter_(-1, tokens, 0.0) if in_place else q_rows.scatter(-1, tokens, 0.0)
        gone = self.gone[:, :count, column, None]
        scatter = q_rows.scatter_reduce_ if in_place else q_rows.scatter_reduce
        return scatter(-1, tokens, gone, "amin")


def _drawn(
    tree: DraftTree,
    group: Group,
    part: slice,
    q_rows: Float[Tensor, "batch some vocab"],
    q: Float[Tensor, "batch node"],
    exists: Bool[Tensor, "batch rank parent"] | None,
) -> _Drawn:
    """Returns what has to be known of siblings drawn without replacement.

    Masses are summed from the small numbers to the large ones: what is left of q may be far below the precision of 1.
    """
    groups, gone = groups_of(tree.topology), None
    index = (group.filled if exists is None else group.last_first)[:, part]
    tokens = tree.tokens.index_select(1, index.flatten()).view(len(q), *index.shape).transpose(1, 2)
    if exists is None:
        others = q_rows.scatter(-1, tokens, 0.0)
    else:  # an invalid sibling has any token, which must stay
        gone = torch.where(exists[..., part].transpose(1, 2), groups.zero, groups.infinite).to(q.dtype)
        others = q_rows.scatter_reduce(-1, tokens, gone, "amin")
    masses = q.new_empty(len(q), len(index) + 1, index.shape[1])
    torch.sum(others, -1, out=masses[:, 0])
    torch.index_select(q, 1, index.flatten(), out=masses.flatten(1)[:, index.shape[1] :])
    if exists is not None:
        return _Drawn(tokens, gone, masses.cumsum(1)[:, 1:].where(exists[..., part], groups.infinite))
    if group.missing is not None:
        masses[:, 1:].masked_fill_(group.missing[:, part], 0.0)
    # Where nothing is left of q, the next step removes everything that could have been drawn, which is 0 already.
    return _Drawn(tokens, gone, masses.cumsum(1).clamp_(min=_LEAST))


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
