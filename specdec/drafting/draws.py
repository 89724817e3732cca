"""Draws the children of a level's nodes, by the law that the acceptance rule is told."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.coupling import race
from specdec.drafting.levels import Level
from specdec.filters import first_largest
from specdec.random import draw
from specdec.types import DraftSampling


def top(scores: Float[Tensor, "batch parent vocab"], level: Level) -> Int[Tensor, "batch child"]:
    """Returns every parent's most probable tokens, in order, for its children (``DETERMINISTIC``).

    One row of scores serves all parents.
    """
    shared = scores.shape[1] == 1
    if level.one_each:
        best = first_largest(scores)
        return best.expand(-1, len(level.parents)) if shared else best
    best = scores.topk(level.width, dim=-1).indices
    return best[:, 0, level.rank_of] if shared else best[:, level.row_of, level.rank_of]


def drawn(
    q: Float[Tensor, "batch parent vocab"],
    level: Level,
    uniform: Float[Tensor, "batch child"],
    law: DraftSampling,
) -> tuple[Int[Tensor, "batch child"], Bool[Tensor, "batch child"] | None]:
    """Returns every parent's children, drawn at random (``IID`` or ``WITHOUT_REPLACEMENT``).

    Args:
        q: The distributions that the children are drawn from.
        level: The level of the parents.
        uniform: One random number per child.
        law: How siblings are drawn.

    Returns:
        The tokens, and which children exist; None if all do. (Without replacement, q may run out of tokens.)
    """
    if law is DraftSampling.IID or level.width == 1:
        weights = q if level.one_each else q.index_select(1, level.row_of)
        return draw(weights, uniform), None
    left = q.clone()
    tokens = torch.zeros_like(uniform, dtype=torch.long)
    exists = torch.ones_like(uniform, dtype=torch.bool)
    for rank, (columns, rows) in enumerate(level.by_rank):
        weights = left.index_select(1, rows)
        token = draw(weights, uniform[:, columns])
        tokens[:, columns] = token
        if rank > 0:
            exists[:, columns] = weights.sum(-1) > 0
        if rank + 1 < level.width:
            left[:, rows] = weights.scatter_(2, token[..., None], 0.0)
    return tokens, exists


def first_arrivals(
    q: Float[Tensor, "batch parent vocab"], level: Level, noise: Float[Tensor, "batch 1 vocab"]
) -> tuple[Int[Tensor, "batch child"], Bool[Tensor, "batch child"] | None]:
    """Returns every parent's first children in the race that the target watches (``COUPLED``), and which exist."""
    arrivals = race(q, noise)
    if level.one_each:
        return arrivals.argmax(-1), None
    earliest, token = arrivals.topk(level.width, dim=-1)
    return token[:, level.row_of, level.rank_of], earliest[:, level.row_of, level.rank_of] > 0
