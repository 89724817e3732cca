"""Exact rules, loosened to accept more. LOSSY: above temperature 0 the output does not follow the target."""

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.arguments import number
from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.target_walk import after_walk
from verifiers.walk import Family, Tried, top_down, try_in_turn

_SAMPLED = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})


class LenientVerifier(Verifier):
    """Rejection sampling with lenience (Leviathan et al. 2023, arXiv 2211.17192, appendix A.5), for chains.

    A sampled token x is accepted with probability min(1, p(x) / (lenience q(x))); a rejection is followed by a draw
    from N([p - q]+), as without lenience. ``DETERMINISTIC`` tokens have no q and are accepted with p(x), so
    temperature 0 is greedy.

    Args:
        lenience: In (0, 1]; 1 is exact.
    """

    exactness = Exactness.LOSSY
    samplings = _SAMPLED
    chain_only = True

    def __init__(self, *, lenience: float = 0.8):
        remedy = "give a factor in (0, 1]; 1 is rejection sampling"
        self.lenience = number("lenience", lenience, remedy, lambda value: 0 < value <= 1)

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        return top_down(tree, target_probs, self._try_children)

    def _try_children(self, family: Family, weight: Float[Tensor, "batch some"]) -> Tried:
        chances, weight, left = try_in_turn(family, weight)
        lenient = (chances / self.lenience).clamp(max=1)
        return lenient.where(family.laws != DraftSampling.DETERMINISTIC, chances), weight, left


class ThresholdVerifier(Verifier):
    """Target walk with thresholds, as in SGLang's ``tree_speculative_sampling_target_only``.

    Every node draws a uniform number u. It accepts the first child, in sibling order, for which p summed over the child
    and its earlier siblings is at least u times ``accumulated``, or whose own p is at least ``single``. If there is no
    such child, the next token is drawn from p without the children. With both thresholds at 1 it is
    ``TargetWalkVerifier``.

    Args:
        single: A token that is at least this probable is always accepted; in (0, 1].
        accumulated: Divides the cumulative mass; in (0, 1].
    """

    exactness = Exactness.LOSSY
    samplings = frozenset(DraftSampling)

    def __init__(self, *, single: float = 1.0, accumulated: float = 1.0):
        for name, value in (("single", single), ("accumulated", accumulated)):
            number(name, value, "give a threshold in (0, 1]; 1 switches it off", lambda value: 0 < value <= 1)
        self.single, self.accumulated = single, accumulated

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        stop = top_down(tree, target_probs, self._try_children, together=True, walks=False).stop
        return Laws(stop, lambda nodes: after_walk(tree, target_probs, nodes))

    def _try_children(self, family: Family, weight: Float[Tensor, "batch some"]) -> Tried:
        tokens = family.tokens
        repeated = (tokens[..., :, None] == tokens[..., None, :]).tril(-1).any(-1)
        p = family.p.gather(-1, tokens).where(family.exists & ~repeated, 0.0)
        share = (p.cumsum(-1) / self.accumulated).clamp(max=1)
        # A child that is certain leaves nothing for its later siblings.
        share = torch.where(p >= self.single, 1.0, share).cummax(-1).values
        before = torch.nn.functional.pad(share[..., :-1], (1, 0))
        return ((share - before) / (1 - before)).nan_to_num(nan=0.0), weight, family.p


class FuzzyVerifier(Verifier):
    """Fuzzy speculative decoding (Holsman et al. 2025, arXiv 2502.20704): where p and q are close, q replaces p.

    At a node where p and q diverge by less than a threshold, the first child is accepted; elsewhere the rule is
    ``RejectionVerifier``. This is rejection sampling with q in the place of p at the close nodes. Nodes with
    ``DETERMINISTIC`` children have no q and are never close, so temperature 0 is greedy.

    Args:
        threshold: Divergence below which p and q are close; with 0 they never are.
        divergence: ``"total_variation"``, ``"kl"`` (of p from q, nats) or ``"jensen_shannon"`` (nats).
    """

    exactness = Exactness.LOSSY
    samplings = _SAMPLED

    def __init__(self, *, threshold: float = 0.1, divergence: str = "jensen_shannon"):
        if divergence not in ("total_variation", "kl", "jensen_shannon"):
            raise ValueError(f"divergence={divergence!r}: choose total_variation, kl or jensen_shannon")
        self.threshold = number("threshold", threshold, "give a divergence of at least 0", lambda value: value >= 0)
        self.divergence = divergence

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        return top_down(tree, target_probs, self._try_children)

    def _try_children(self, family: Family, weight: Float[Tensor, "batch some"]) -> Tried:
        chances, weight, left = try_in_turn(family, weight)
        drawn = (family.laws != DraftSampling.DETERMINISTIC).all(-1)  # that q is the children's
        close = family.exists[..., 0] & drawn & (_divergence(family.p, family.q, self.divergence) < self.threshold)
        first = torch.arange(chances.shape[-1], device=chances.device) == 0
        return torch.where(close[..., None], first.to(chances.dtype), chances), weight, left


def _divergence(
    p: Float[Tensor, "batch node vocab"], q: Float[Tensor, "batch node vocab"], name: str
) -> Float[Tensor, "batch node"]:
    """Return the divergence of p and q at every node."""
    if name == "total_variation":
        return 0.5 * (p - q).abs().sum(-1)
    if name == "kl":
        return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)
    mean = (p + q) / 2
    return 0.5 * (torch.xlogy(p, p) + torch.xlogy(q, q)).sum(-1) - torch.xlogy(mean, mean).sum(-1)
