"""Arithmetic of a rejection: how probable it is, and what it leaves of the distributions."""

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from specdec.types import DraftSampling


def acceptance(
    p: Float[Tensor, "*rows"], q: Float[Tensor, "*rows"], law: Int8[Tensor, "*rows"]
) -> Float[Tensor, "*rows"]:
    """Returns the probability min(1, p / q) of accepting a token that has these probabilities; 0 where q is 0.

    For a deterministic token q counts as 1.
    """
    q = q.where(law != DraftSampling.DETERMINISTIC, 1.0)
    return (p / q).clamp(max=1).where(q > 0, 0.0)


def residual(
    p: Float[Tensor, "*rows vocab"],
    q: Float[Tensor, "*rows vocab"],
    token: Int[Tensor, "*rows"],
    law: Int8[Tensor, "*rows"],
) -> Float[Tensor, "*rows vocab"]:
    """Returns [p - q]+, not normalized; for a deterministic child q is one-hot.

    Args:
        p: What is to be emitted, of total mass at most 1.
        q: What the child was drawn from; not read where the child is deterministic.
        token: The child's token.
        law: How the child was drawn, -1 where there is no child (the result is p there).
    """
    left = torch.where((law > DraftSampling.DETERMINISTIC)[..., None], p - q, p)
    certain = torch.where(law == DraftSampling.DETERMINISTIC, -torch.inf, 0.0).to(p.dtype)
    left.scatter_add_(-1, token[..., None], certain[..., None])
    return left.clamp_(min=0)


def normalized(
    weights: Float[Tensor, "*rows vocab"],
    fallback: Float[Tensor, "*rows vocab"],
    condition: Bool[Tensor, "*rows 1"] | None = None,
) -> Float[Tensor, "*rows vocab"]:
    """Returns weights scaled to sum to 1; the fallback where they are all 0 (or NaN) or the condition is false."""
    total = weights.sum(-1, keepdim=True)
    usable = total > 0
    if condition is not None:
        usable &= condition
    return (weights / total).where(usable, fallback)


def without(
    q: Float[Tensor, "*rows vocab"], token: Int[Tensor, "*rows"], some: Bool[Tensor, "*rows"] | None = None
) -> Float[Tensor, "*rows vocab"]:
    """Returns a distribution without one token, normalized; all 0 where nothing is left.

    Args:
        q: The distribution.
        token: The token.
        some: The rows where it is taken out; by default all.
    """
    if some is None:
        left = q.scatter(-1, token[..., None], 0.0)
    else:
        left = q.scatter_add(-1, token[..., None], torch.where(some, -torch.inf, 0.0).to(q.dtype)[..., None])
        left = left.clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    return left / total.where(total > 0, 1.0)


def weight_left(z: Float[Tensor, "*rows"], weight: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """Returns Z / (Z + 1 - w): the weight of a node that had the weight w, after a failure that left Z of w p."""
    # Added in this order, because z may be far below the precision of 1.
    return (z / (z + (1 - weight))).where(z > 0, 0.0)
