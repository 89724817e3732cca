"""The most that a lossless rule can accept of one group of siblings, for vocabularies as large as a trace's."""

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.types import DraftSampling
from verifiers.transport import optimal_acceptance


def sibling_bound(
    p: Float[Tensor, "row vocab"], q: Float[Tensor, "row vocab"], children: int, law: DraftSampling
) -> Float[Tensor, " row"] | None:
    """The largest probability, over the draws of some siblings, with which a lossless rule can accept one of them.

    For siblings drawn without replacement ``optimal_acceptance`` would enumerate all tuples of tokens. Here two or
    three siblings are added up by cumulative sums, so a large vocabulary is no obstacle. None for more than three.
    """
    if law is DraftSampling.IID or children == 1:
        return optimal_acceptance(p, q, children, DraftSampling.IID)
    if law is not DraftSampling.WITHOUT_REPLACEMENT or children > 3:
        return None
    ratio = torch.where(p > 0, q / p, torch.where(q > 0, torch.inf, -torch.inf))
    order = ratio.argsort(dim=-1, descending=True)
    mass, drafted = p.gather(-1, order).cumsum(-1), q.gather(-1, order)
    drafted = drafted / drafted.sum(-1, keepdim=True)
    inside = torch.stack([_all_inside(row, children) for row in drafted]) if len(drafted) else drafted
    return 1 + (mass - inside).amin(-1).clamp(max=0)


def _all_inside(q: Float[Tensor, " vocab"], children: int) -> Float[Tensor, " vocab"]:
    """Probability that all of two or three draws without replacement are among the first 1, 2, … tokens.

    The last draw is inside with (q(H) - q(a)) / (1 - q(a)) after one draw a, likewise after two:
    1 - (1 - q(H)) / (1 - q(a) - q(b)).
    """
    total = q.cumsum(0)
    outside = (1 - total).clamp(min=0)
    after = 1 - q
    one = q / after.where(after > 0, 1.0)
    two = total - outside * one.cumsum(0)
    if children == 2:
        return two
    left = after[:, None] - q
    pairs = one[:, None] * q / left.where(left > 1e-12, torch.inf)
    pairs.fill_diagonal_(0)
    # What the m-th token adds to the sum over all pairs of the first m.
    added = pairs.triu().sum(0) + pairs.tril().sum(1)
    return two - outside * added.cumsum(0)
