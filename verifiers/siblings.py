"""Siblings that are tried one after the other: all of their chances, in few and large operations.

A node has the law p and, in rules that work from the leaves to the root, a weight w. Its children x_0, x_1, ... are
tried in turn. What is left of w p before child r is v_r, of total mass w_r. The child is accepted with the probability
min(1, v_r(x_r) / q_r(x_r)). If it is rejected, with Z = sum [v_r - q_r]+,

    v_{r+1} = [v_r - q_r]+ / (Z + 1 - w_r).

It pays not to divide the table at every step. Let v_r = u_r / t_r with u_0 = w p and t_0 = 1. Then

    u_{r+1} = [u_r - t_r q_r]+    and    t_{r+1} = sum u_{r+1} + (1 - w),

because t_r (1 - w_r) is 1 - w at every step. So a rejected child costs one product, one maximum and one sum over the
vocabulary. For w = 1 this is rejection sampling: w_r stays 1, and v_r is p_r.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from specdec.types import DraftSampling
from verifiers.families import Family, drafted_laws
from verifiers.residuals import residual

_IN_TURN = (DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT)


@dataclass(frozen=True, eq=False)
class Siblings:
    """The children of some nodes, sorted by rank: first all first children, then all second ones.

    Nodes with more children stand first, so that the parents of the children of any rank are the first few nodes.

    Attributes:
        having: How many of the nodes have a child of each rank; not increasing.
        tokens: The children's tokens; any token where there is no child.
        laws: How each was drawn; -1 where there is no child.
        only_law: The law of all children, if the host knows that there is one.
    """

    having: Sequence[int]
    tokens: Int[Tensor, "batch child"]
    laws: Int8[Tensor, "batch child"]
    only_law: DraftSampling | None


@dataclass(frozen=True, eq=False)
class Tried:
    """What came of trying the children of some nodes in turn.

    Attributes:
        chances: The probability of accepting each child, given that its earlier siblings were rejected; 0 where there
            is no child.
        left: What is left of w p once all children are rejected: u, not divided by t.
        mass: The sum of ``left`` over the vocabulary; None if no weights were given.
    """

    chances: Float[Tensor, "batch child"]
    left: Float[Tensor, "batch some vocab"]
    mass: Float[Tensor, "batch some"] | None


def by_rank(family: Family) -> tuple[Siblings, Callable[[Tensor], Tensor]]:
    """Returns the children of a family sorted by rank, and what puts values in this order back into a table."""
    only_law, group = family.tree.only_law, family.sorted_group
    most = family.index.shape[-1]
    if group is None:
        having = (family.nodes.shape[1],) * most
        laws, tokens = (values.transpose(1, 2).flatten(1) for values in (family.laws, family.tokens))
        return Siblings(having, tokens, laws, only_law), lambda values: values.unflatten(1, (most, -1)).transpose(1, 2)
    laws, tokens = (values.index_select(1, group.by_rank) for values in (drafted_laws(family.tree), family.tree.tokens))
    siblings = Siblings(group.having, tokens, laws, only_law)
    if group.having[-1] == group.having[0]:
        return siblings, lambda values: values.unflatten(1, (most, -1)).transpose(1, 2)
    return siblings, lambda values: torch.nn.functional.pad(values, (0, 1)).index_select(1, group.unsorted).unflatten(
        1, (-1, most)
    )


def share(
    q: Float[Tensor, "*rows"], laws: Int8[Tensor, "*rows"], only_law: DraftSampling | None = None
) -> Float[Tensor, "*rows"]:
    """Returns with which probability each child was drawn: q, or 1 for a deterministic one; 0 where there is none."""
    if only_law in _IN_TURN:
        return q * (laws > 0)
    # Where a child is deterministic, q may be anything, even NaN.
    return torch.where(laws > 0, q, laws == DraftSampling.DETERMINISTIC)


def chance(mass: Float[Tensor, "*rows"], drawn: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """Returns min(1, mass / drawn), and 0 where ``drawn`` is 0."""
    return torch.minimum(mass, drawn) / drawn.clamp(min=torch.finfo(drawn.dtype).tiny)


def try_in_turn(
    p: Float[Tensor, "batch some vocab"],
    q: Float[Tensor, "batch some vocab"],
    siblings: Siblings,
    weight: Float[Tensor, "batch some"] | None = None,
) -> Tried:
    """Try the children of some nodes in turn.

    Args:
        p: The target's distribution at the nodes.
        q: The draft's, not read where all children are deterministic.
        siblings: The children.
        weight: The nodes' weights. None if all are 1; if nothing is left of p then, all of it comes back.
    """
    known = siblings.only_law in _IN_TURN
    iid, may_repeat = siblings.only_law is DraftSampling.IID, siblings.only_law is not DraftSampling.WITHOUT_REPLACEMENT
    tokens = _by_rank(siblings.tokens, siblings.having)
    laws = _by_rank(siblings.laws, siblings.having)
    sampled = _by_rank(siblings.laws > 0, siblings.having)
    # What a write of the smaller value does to a child's token: nothing, or it is gone.
    gone = [] if iid else _by_rank(_gone_if(siblings.laws >= 0, p.dtype), siblings.having)
    certain = [] if known else _by_rank(_gone_if(siblings.laws == 0, p.dtype), siblings.having)
    if not known:
        q = q.nan_to_num()
    left, slack = (p, None) if weight is None else (p * weight[..., None], 1 - weight)
    total: Tensor | None = None  # t, of the nodes that have a child of this rank; None stands for 1
    mass = weight
    masses, drawn, totals = [], [], []
    without = q
    for rank, count in enumerate(siblings.having):
        here = slice(count)
        token = tokens[rank][..., None]
        draft = q[:, here]
        draft_mass: Tensor | None = None
        if rank > 0 and not iid:
            before = tokens[rank - 1][:, here, None], gone[rank - 1][:, here, None]
            if rank == 1:
                without = draft.scatter_reduce(-1, *before, "amin")
            else:
                without = without[:, here].scatter_reduce_(-1, *before, "amin")
            draft, draft_mass = without, without.sum(-1).clamp_(min=torch.finfo(p.dtype).tiny)
            if may_repeat:
                again = laws[rank] == DraftSampling.IID
                draft, draft_mass = q[:, here].where(again[..., None], draft), draft_mass.masked_fill(again, 1.0)
        at = draft.gather(-1, token)[..., 0]
        masses.append(left[:, here].gather(-1, token)[..., 0])
        drawn.append(at if draft_mass is None else at / draft_mass)
        totals.append(torch.ones_like(at) if total is None else total[:, here])
        taken = sampled[rank] if total is None else total[:, here] * sampled[rank]
        taken = taken.to(p.dtype) if draft_mass is None else taken / draft_mass
        if left is p:
            left = torch.addcmul(p, draft, taken[..., None], value=-1)
            now = left
        else:
            now = left[:, here].addcmul_(draft, taken[..., None], value=-1)
        if not known:
            now.scatter_reduce_(-1, token, certain[rank][..., None], "amin")
        now.clamp_(min=0)
        sums = now.sum(-1)
        last = rank + 1 == len(siblings.having)
        if weight is None and not last:
            dead = sums == 0
            now.addcmul_(p[:, here], dead[..., None].to(p.dtype))
            sums = sums + dead
        if mass is not None:
            mass = sums if count == mass.shape[1] else torch.cat([sums, mass[:, count:]], 1)
        total = sums if slack is None else sums + slack[:, here]
    mine = share(torch.cat(drawn, 1), siblings.laws, siblings.only_law)
    return Tried(chance(torch.cat(masses, 1), mine * torch.cat(totals, 1)), left, mass)


def rejected(
    p: Float[Tensor, "*rows vocab"],
    q: Float[Tensor, "*rows vocab"],
    token: Int[Tensor, "*rows"],
    law: Int8[Tensor, "*rows"],
    only_law: DraftSampling | None = None,
) -> Float[Tensor, "*rows vocab"]:
    """Returns [p - q]+, what is left of p after one child was rejected, not normalized; p where there is no child.

    Args:
        p: What is to be emitted.
        q: What the child was drawn from; not read where it is deterministic.
        token: The child's token.
        law: How it was drawn; -1 where there is no child.
        only_law: The law of all children, if the host knows that there is one.
    """
    if only_law in _IN_TURN:
        return torch.addcmul(p, q, (law > 0)[..., None].to(p.dtype), value=-1).clamp_(min=0)
    return residual(p, q, token, law)


def _by_rank(values: Tensor, having: Sequence[int]) -> Sequence[Tensor]:
    """Returns the children's values of every rank; views."""
    return values.split(list(having), dim=1)


def _gone_if(condition: Bool[Tensor, "batch child"], dtype: torch.dtype) -> Float[Tensor, "batch child"]:
    """Returns 0 where the condition holds, infinity elsewhere."""
    return torch.where(condition, 0.0, torch.inf).to(dtype)
