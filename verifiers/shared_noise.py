"""Drafter-invariant decoding: drafter and target look at the same noise."""

from jaxtyping import Float, Int
from torch import Tensor

from specdec.interfaces import Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness, Noise
from verifiers.target_walk import TargetWalkVerifier


class SharedNoiseVerifier(Verifier):
    """Coupled sampling with the Gumbel-max trick (Daliri, Musco & Suresh 2024, arXiv 2408.07978, algorithm 2).

    The target's token at a position is argmax log p(x) + g(x), where the Gumbel noise g is a hash of the request's
    key, the position and x; the path goes down while that token is a child, and the first that is none is emitted.
    A drafter that takes the first k of log q + g (``ModelDrafter(..., sampling="coupled")``) mostly proposes it: with
    one child with probability Σ_x 1 / Σ_y max(p(y) / p(x), q(y) / q(x)), at least (1 - TV) / (1 + TV) for the total
    variation TV of p and q. ``specdec.coupling.coupled_acceptance`` has the probability for k.

    The output is a function of target and seed alone. It is the same whatever the drafter, the tree and its pruning,
    and equal to plain decoding on the same engine token for token (as far as the logits are): so any draft is exact,
    also one that was selected after it was drawn, and a change of the drafter changes no sample. Over seeds it
    follows the target. Gumbel-max list sampling (Rowan, Phan & Khisti 2025, arXiv 2506.05632) couples a list of
    independent drafts; here siblings are the first k in one race, which are drawn without replacement.

    Given the tree nothing is random: ``expected_accepted`` is the number of accepted tokens itself.
    """

    exactness = Exactness.EXACT
    laws = frozenset(DraftSampling)
    noise = Noise.SHARED

    def __init__(self):
        self._rule = TargetWalkVerifier()

    def stop_law(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Float[Tensor, "batch node"]:
        """All where the walk along the target's tokens ends; ``target_probs`` are one-hot."""
        return self._rule.stop_law(tree, target_probs)

    def next_law(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch node vocab"],
        stop: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch vocab"]:
        """All on the target's token there."""
        return self._rule.next_law(tree, target_probs, stop)
