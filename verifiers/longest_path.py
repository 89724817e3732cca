"""Rules that accept the longest path of plausible tokens. LOSSY: above temperature 0 they do not follow the target."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.arguments import number, whole
from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.trees import entries, rows_of


class TypicalVerifier(Verifier):
    """Medusa's typical acceptance (Cai et al. 2024, arXiv 2401.10774, section 2.3.1).

    A token x is plausible if p(x) > min(epsilon, delta * exp(-H(p))), where H is the entropy of p in nats.

    Args:
        epsilon: Hard threshold, in (0, 1).
        delta: Factor of the entropy-dependent threshold. None is the square root of epsilon, as in the paper.
    """

    exactness = Exactness.LOSSY
    samplings = frozenset(DraftSampling)

    def __init__(self, *, epsilon: float = 0.09, delta: float | None = None):
        self.epsilon = number("epsilon", epsilon, "give a probability in (0, 1)", lambda value: 0 < value < 1)
        remedy = "give a positive factor, or None for the square root of epsilon"
        self.delta = self.epsilon**0.5 if delta is None else number("delta", delta, remedy, lambda value: value > 0)

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        entropy = -torch.xlogy(target_probs, target_probs).sum(-1)
        threshold = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        p = target_probs.flatten(1).gather(1, entries(tree, target_probs.shape[2]))
        return longest_path(tree, target_probs, p, p > threshold.gather(1, tree.parents.clamp(min=0)))


class RelaxedTopKVerifier(Verifier):
    """A token is plausible if it is among the target's k most probable (and possible at all).

    Args:
        k: How many of the target's tokens are accepted. Ties keep the lower token id.
    """

    exactness = Exactness.LOSSY
    samplings = frozenset(DraftSampling)

    def __init__(self, *, k: int = 3):
        self.k = whole("k", k, least=1)

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        ids = target_probs.sort(dim=-1, descending=True, stable=True).indices[..., : self.k]
        among = torch.zeros_like(target_probs, dtype=torch.bool).scatter_(-1, ids, True)
        entry = entries(tree, target_probs.shape[2])
        p = target_probs.flatten(1).gather(1, entry)
        return longest_path(tree, target_probs, p, among.flatten(1).gather(1, entry) & (p > 0))


def longest_path(
    tree: DraftTree,
    target_probs: Float[Tensor, "batch node vocab"],
    p: Float[Tensor, "batch node"],
    plausible: Bool[Tensor, "batch node"],
) -> Laws:
    """Return laws with all mass at the end of the longest path of plausible tokens, which p follows.

    Among several longest paths, the one that is most probable under p is taken. Given the tree, only the next token is
    random. At temperatures above 0 confident drafts are favoured, so the output does not follow the target. At
    temperature 0 p is one-hot, and this is greedy matching.

    Args:
        p: The probability of every node's token, given the path above it.
        plausible: Which tokens may be accepted; not read at the root and at invalid nodes.
    """
    plausible = plausible & tree.valid
    plausible[:, 0] = True
    accepted = (plausible[:, None] | ~tree.ancestors).all(-1)
    log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log()
    log_p[:, 0] = 0
    likelihood = torch.where(tree.ancestors, log_p[:, None], 0.0).sum(-1)
    longest = tree.depth.where(accepted, -1).amax(-1, keepdim=True)
    end = likelihood.where(accepted & (tree.depth == longest), -torch.inf).argmax(-1, keepdim=True)
    return Laws(torch.zeros_like(p).scatter_(1, end, 1.0), lambda stop: rows_of(stop, target_probs)[0])
