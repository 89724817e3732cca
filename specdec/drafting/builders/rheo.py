"""A tree of the most probable tokens and one drawn token below every node."""

import torch
from torch import Tensor

from specdec.arguments import whole
from specdec.drafting.builders.sampled import Children, DrawnTree, without_replacement
from specdec.types import DraftSampling


class RheoTree(DrawnTree):
    """Offers a node's most probable token, one drawn from all others, and further tokens: RheoSampling.

    The drawn token (``IID``, from q without the most probable token) is verified first, then the chosen ones
    (``DETERMINISTIC``) in the order of q (arXiv 2609.21827). Its slot is ranked by min(q₁, 1 - q₁), q₁ being the most
    probable token's: no less than any other token's q, and it wins ties, so that what is kept before it does not depend
    on it. ``rejection`` and ``traversal`` are exact as they are; the paper's own verification could not be read.
    """

    takes = DraftSampling.IID, DraftSampling.DETERMINISTIC
    draws, ordered = 1, False
    pruned = False  # policies go by the order of the tree, which is not that of the slots' worth

    def __init__(self, nodes: int = 32, depth: int = 6, width: int = 8):
        super().__init__(nodes, depth, whole("width", width, least=2))

    def laws(self, sampling: DraftSampling) -> frozenset[DraftSampling]:
        return super().laws(sampling) | {DraftSampling.DETERMINISTIC}

    def drawn(self, above: Tensor, scores: Tensor, q: Tensor, uniform: Children) -> tuple[Tensor, ...]:
        first, top = q.max(-1, keepdim=True)
        others = q.scatter(2, top, 0.0)
        token, own = without_replacement(others, uniform[..., :1])
        exists = own > 0
        rank = torch.minimum(first, 1 - first).maximum(others.amax(-1, keepdim=True)).where(exists, 0.0)
        chosen, column = torch.where(exists, q.scatter(2, token, 0.0), q).topk(uniform.shape[2] - 1, dim=-1)
        worth = above[:, :, None] * torch.cat([rank, chosen], dim=2).double()
        others = others / others.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
        return others, torch.cat([token, column], dim=2), worth, worth
