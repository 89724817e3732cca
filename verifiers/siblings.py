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
from jaxtyping import Bool, Float, Int, Int8, Shaped
from torch import Tensor

from specdec.types import DraftSampling
from verifiers.families import Family, drafted_laws
from verifiers.residuals import residual

IN_TURN = (DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT)
"""The laws of drawn siblings. If the host knows that all are of one of these, nothing has to be done for others."""


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
        weight: What is left of the nodes' weight once all children are rejected; None if no weights were given.
        left: What is left of w p then: u, not divided by t.
    """

    chances: Float[Tensor, "batch child"]
    weight: Float[Tensor, "batch some"] | None
    left: Float[Tensor, "batch some vocab"]


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
    return (
        siblings,
        lambda values: torch.nn.functional.pad(values, (0, 1)).index_select(1, group.unsorted).unflatten(1, (-1, most)),
    )


def share(
    q: Float[Tensor, "*rows"], laws: Int8[Tensor, "*rows"], only_law: DraftSampling | None = None
) -> Float[Tensor, "*rows"]:
    """Returns with which probability each child was drawn: q, or 1 for a deterministic one; 0 where there is none."""
    # Where a child is deterministic or invalid, q may be anything, even NaN.
    if only_law in IN_TURN:
        return q.masked_fill(laws < 0, 0.0)
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
    known = siblings.only_law in IN_TURN
    iid, may_repeat = siblings.only_law is DraftSampling.IID, siblings.only_law is not DraftSampling.WITHOUT_REPLACEMENT
    tiny = torch.finfo(p.dtype).tiny
    tokens = _split(siblings.tokens[..., None], siblings.having)
    sampled = _split((siblings.laws > 0).to(p.dtype), siblings.having)
    # What a write of the smaller value does to a child's token: nothing, or it is gone.
    gone = () if iid else _split(_gone_if(siblings.laws >= 0, p.dtype), siblings.having)
    certain = () if known else _split(_gone_if(siblings.laws == 0, p.dtype), siblings.having)
    again = _split(siblings.laws == DraftSampling.IID, siblings.having) if may_repeat and not iid else ()
    if not known:
        q = q.nan_to_num()  # where a child is deterministic, q may be anything
    left, slack = (p, None) if weight is None else (p * weight[..., None], 1 - weight)
    mass, total = weight, None  # total: t; None stands for 1
    without = q
    masses, drawn = [], []
    for rank, count in enumerate(siblings.having):
        here, token, draft, draft_mass = slice(count), tokens[rank], q[:, :count], None
        if rank > 0 and not iid:
            before = tokens[rank - 1][:, here], gone[rank - 1][:, here, None]
            without = (
                draft.scatter_reduce(-1, *before, "amin")
                if rank == 1
                else without[:, here].scatter_reduce_(-1, *before, "amin")
            )
            draft, draft_mass = without, without.sum(-1).clamp_(min=tiny)
            if may_repeat:
                draft = q[:, here].where(again[rank][..., None], draft)
                draft_mass = draft_mass.masked_fill(again[rank], 1.0)
        if total is not None:
            total = total[:, here]
        masses.append(left[:, here].gather(-1, token)[..., 0])
        q_here = draft.gather(-1, token)[..., 0]
        q_here = q_here if draft_mass is None else q_here / draft_mass
        q_here = q_here * sampled[rank] if known else torch.where(sampled[rank] > 0, q_here, certain[rank] == 0)
        drawn.append(q_here if total is None else q_here * total)
        taken = sampled[rank] if total is None else total * sampled[rank]
        taken = taken if draft_mass is None else taken / draft_mass
        if left is p:
            left = now = torch.addcmul(p, draft, taken[..., None], value=-1)
        else:
            now = left[:, here].addcmul_(draft, taken[..., None], value=-1)
        if not known:
            now.scatter_reduce_(-1, token, certain[rank][..., None], "amin")
        now.clamp_(min=0)
        if weight is None and rank + 1 == len(siblings.having):
            break
        sums = now.sum(-1)
        if mass is None or slack is None:
            dead = (sums == 0).to(p.dtype)
            now.addcmul_(p[:, here], dead[..., None])
            total = sums + dead
        else:
            mass = sums if count == mass.shape[1] else torch.cat([sums, mass[:, count:]], 1)
            total = sums + slack[:, here]
    own = None if mass is None or slack is None else mass / (mass + slack).clamp_(min=tiny)
    return Tried(chance(torch.cat(masses, 1), torch.cat(drawn, 1)), own, left)


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
    if only_law in IN_TURN:
        return torch.addcmul(p, q, (law > 0)[..., None].to(p.dtype), value=-1).clamp_(min=0)
    return residual(p, q, token, law)


def _split(values: Shaped[Tensor, "batch child ..."], having: Sequence[int]) -> Sequence[Tensor]:
    """Returns the children's values of every rank; views."""
    return values.split(list(having), dim=1)


def _gone_if(condition: Bool[Tensor, "batch child"], dtype: torch.dtype) -> Float[Tensor, "batch child"]:
    """Returns 0 where the condition holds, infinity elsewhere."""
    return torch.where(condition, 0.0, torch.inf).to(dtype)
