"""Traversal verification of drawn siblings: weights from the root down, level by level, then all nodes at once.

The numbers are those of ``verifiers.thresholds``, with w p in the place of p and 1 - w added to every t: at a node of
weight w, child r gets the weight min(1, (w p(x_r) - c_r q(x_r)) / (s_r q(x_r))). Once all weights are known, what is
left of every node after its children, and its sum Z, are one pass over the vocabulary for all nodes together.

Here, too, nothing has to be done about the tokens of earlier siblings that were drawn without replacement. Everything
below a child is rejected only if its weight is less than 1, because a node of weight 1 is accepted itself if nothing
below it is. So w p(x_r) < (c_r + s_r) q(x_r), and nothing is left of p there.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.acceptance import parts_of
from specdec.tree import DraftTree
from specdec.types import DraftSampling
from verifiers.families import Family
from verifiers.groups import Groups, groups_of
from verifiers.thresholds import fill_steps, masses_left, new_steps, of_tokens, rows_of_group


@dataclass(frozen=True, eq=False)
class Descended:
    """What came of trying all nodes.

    Attributes:
        chance: The probability that each node succeeds once it is its turn; 0 at invalid nodes, 1 at the root.
        weight: The weights.
        after: c at every node after all of its children were rejected; 0 where there are none.
    """

    chance: Float[Tensor, "batch node"]
    weight: Float[Tensor, "batch node"]
    after: Float[Tensor, "batch node"]


def descend(tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Descended:
    """Try all nodes of a tree that ``has_thresholds``."""
    groups = groups_of(tree.topology)
    p, q, drafted = of_tokens(tree, target_probs)
    several, masses = groups.siblings_in_turn, None
    both, exists = new_steps(p, groups.parents_in_turn, drafted)
    if several is not None and tree.only_law is DraftSampling.WITHOUT_REPLACEMENT:
        some = None if drafted is None else drafted.index_select(1, several.last_first.flatten())
        masses = masses_left(tree, several, q, None if some is None else some.view(len(p), *several.last_first.shape))
    # A token that q excludes is not accepted.
    ratio = (p / q).nan_to_num_(nan=0.0, posinf=0.0)
    weight = torch.ones_like(p)
    for level in groups.descent:
        place, columns = slice(level.first, level.last), level.columns
        if level.one_each:
            first = level.nodes.place[0] if level.nodes.place is not None else 0
            came = weight[:, first : first + level.last - level.first]
        else:
            came = weight.index_select(1, level.above)
        value = came * ratio[:, place]
        if level.siblings is None:
            torch.clamp(value, max=1, out=weight[:, place])
            continue
        fill_steps(
            both[:, 0, :, columns],
            tree,
            target_probs,
            level.siblings,
            None if exists is None else exists[..., columns],
            None if masses is None else masses[..., level.places],
            weight.index_select(1, level.siblings.nodes),
        )
        torch.cumsum(both[:, 0, :, columns], 1, out=both[:, 1, :, columns])
        before, taken = both.flatten(1).index_select(1, level.picks).unflatten(1, (2, -1)).unbind(1)
        value = value.sub_(before).div_(taken).nan_to_num_(nan=0.0, posinf=0.0)
        torch.clamp(value, min=0, max=1, out=weight[:, place])
    torch.cumsum(both[:, 0], 1, out=both[:, 1])
    after = both.flatten(1).index_select(1, groups.ends_in_turn)
    at_nodes = weight.index_select(1, groups.parents.nodes)
    z = _left(tree, target_probs, groups, at_nodes, after.index_select(1, groups.parents.nodes))
    own = z / (z + (1 - at_nodes)).clamp_(min=torch.finfo(z.dtype).tiny)
    chance = weight.index_copy(1, groups.parents.nodes, own)
    chance[:, 0].fill_(1)
    if drafted is not None:  # p of an invalid node may be anything
        chance = chance.where(tree.valid, groups.zero)
    return Descended(chance, weight, after)


def _left(
    tree: DraftTree,
    target_probs: Float[Tensor, "batch node vocab"],
    groups: Groups,
    weight: Float[Tensor, "batch some"],
    after: Float[Tensor, "batch some"],
) -> Float[Tensor, "batch some"]:
    """Returns the sum of [w p - c q]+ at every node that has children."""
    assert tree.draft_probs is not None, "nodes were drawn from something"
    z = torch.empty_like(weight)
    for part in parts_of(z.shape[1], target_probs[:, 0].numel()):
        p_rows, q_rows = (rows_of_group(table, groups.parents, part) for table in (target_probs, tree.draft_probs))
        left = (p_rows * weight[:, part, None]).addcmul_(q_rows.to(p_rows.dtype), after[:, part, None], value=-1)
        torch.sum(left.clamp_(min=0), -1, out=z[:, part])
    return z


def law_after(
    tree: DraftTree,
    target_probs: Float[Tensor, "batch node vocab"],
    stop: Int[Tensor, " batch"],
    tried: Descended,
) -> Float[Tensor, "batch vocab"]:
    """Returns the law of the next token at ``stop``; p itself, to the last bit, where no child was tried."""
    at = stop[:, None]
    c, w = tried.after.gather(1, at), tried.weight.gather(1, at)
    here = Family(tree, target_probs, at)
    p, q = here.p[:, 0], here.q[:, 0]
    left = (p * w).addcmul_(q, c, value=-1).clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    # A leaf's q may be anything, even NaN; a comparison with NaN is false.
    return (left / total).where(torch.minimum(total, c) > 0, p)
