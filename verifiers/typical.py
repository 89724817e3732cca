"""Typical acceptance: keep what the target finds plausible. Lossy."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.interfaces import Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.siblings import longest_path


class TypicalVerifier(Verifier):
    """Medusa's typical acceptance (Cai et al. 2024, arXiv 2401.10774, section 2.3.1).

    A drafted token x is accepted where p(x) > min(epsilon, delta * exp(-H(p))), H being the entropy of p in nats, and
    every token above it is; of the longest accepted paths the one most probable under p is taken, and the next token
    is drawn from p. The output does not follow the target: confident drafts are favoured at temperatures above 0. At
    temperature 0 p is one-hot and the rule is greedy matching.

    Args:
        epsilon: Hard threshold, in (0, 1).
        delta: Factor of the entropy-dependent threshold; the paper takes the square root of epsilon. None does, too.
    """

    exactness = Exactness.LOSSY
    laws = frozenset(DraftSampling)

    def __init__(self, *, epsilon: float = 0.09, delta: float | None = None):
        if not 0 < epsilon < 1:
            raise ValueError(f"epsilon={epsilon}: give a probability in (0, 1)")
        if delta is not None and not delta > 0:
            raise ValueError(f"delta={delta}: give a positive factor, or None for the square root of epsilon")
        self.epsilon = epsilon
        self.delta = epsilon**0.5 if delta is None else delta

    def stop_law(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Float[Tensor, "batch node"]:
        """All at one node: given the tree, nothing is random."""
        parents = tree.parents.clamp(min=0)
        entropy = -torch.xlogy(target_probs, target_probs).sum(-1)
        threshold = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon).gather(1, parents)
        p = target_probs.flatten(1).gather(1, parents * target_probs.shape[2] + tree.tokens)
        return longest_path(tree, p, p > threshold)

    def next_law(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch node vocab"],
        stop: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch vocab"]:
        """P at the node."""
        return target_probs[torch.arange(len(stop), device=stop.device), stop]
