"""Nucleus verification: a draft that the target might well say is kept, however sure the drafter was. LOSSY."""

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.arguments import number
from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.walk import Family, Tried, top_down, try_in_turn


class NucleusVerifier(Verifier):
    """Nucleus speculative decoding, NSD (arXiv 2610.07822), for sampled chains. LOSSY.

    A draft x in the nucleus of p is accepted, any other with probability min(1, p(x) / q(x)). The nucleus has the most
    probable tokens, up to the one with which they have ``mass`` together. A rejection is followed by a draw from
    N([p - q]+): this residual is inferred from the paper's bound, which it meets, and the abstract does not say it. So
    the law of a step is off by a total variation of exactly

        Σ [q(x) - p(x)]+ over the nucleus.

    At temperature 0 this is greedy matching.

    Args:
        mass: In [0, 1]; 0 is rejection sampling, 1 keeps every token that p allows.
    """

    exactness = Exactness.LOSSY
    samplings = frozenset({DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})  # the same for an only child
    chain_only = True

    def __init__(self, *, mass: float = 0.9):
        remedy = "give a probability in [0, 1]; 0 is rejection sampling"
        self.mass = number("mass", mass, remedy, lambda value: 0 <= value <= 1)

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        return top_down(tree, target_probs, self._try_child)

    def _try_child(self, family: Family, weight: Float[Tensor, "batch some"]) -> Tried:
        chances, weight, left = try_in_turn(family, weight)
        p, token = family.p, family.tokens
        own, ids = p.gather(-1, token), torch.arange(p.shape[-1], device=p.device)
        ahead = (p > own) | ((p == own) & (ids < token))
        before = p.masked_fill(~ahead, 0.0).sum(-1, keepdim=True)
        nucleus = (before < self.mass) & (own > 0) & family.exists
        return chances.masked_fill(nucleus, 1.0), weight, left
