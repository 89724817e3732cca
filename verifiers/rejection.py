"""Rejection sampling, from the root down and sibling by sibling: it fits every way of drafting but shared noise."""

from jaxtyping import Float
from torch import Tensor

from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.thresholds import has_thresholds, laws_by_thresholds
from verifiers.trees import ratios
from verifiers.walk import top_down


class RejectionVerifier(Verifier):
    """Token-level rejection sampling on chains and trees.

    At a node v, the valid children are tried in sibling order. Let p_0 = p_v. The child x of rank r is accepted with
    probability a = min(1, p_r(x) / q_r(x)); if it is rejected, p_{r+1} = N([p_r - q_r]+) replaces p_r, where N
    normalizes and N(0) is p_v. If no child is accepted, the next token is drawn from the last p_r. The law of the child
    says what q_r is, so siblings may mix laws, and each of these rules is a case of this one:

    * ``IID``: q_r = q. On a chain, speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1;
      Chen et al. 2023, arXiv 2302.01318); on a tree, multi-step speculative sampling of SpecInfer (Miao et al.
      2023, arXiv 2305.09781).
    * ``WITHOUT_REPLACEMENT``: q_r is q without the tokens of earlier siblings, normalized: recursive rejection
      sampling (Jeon et al. 2024, arXiv 2402.14160; Yang et al. 2024, arXiv 2401.06706).
    * ``DETERMINISTIC``: q_r is one-hot. A child is then accepted with its probability under p. This amounts to drawing
      from p and going down while the draw is a child: the acceptance of EAGLE-2 (Li et al. 2024, arXiv 2406.16858), and
      greedy matching at temperature 0.
    """

    exactness = Exactness.EXACT
    samplings = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})
    walks_greedily = True

    def along(self, p: Tensor, q: Tensor, tokens: Tensor, law: DraftSampling) -> Tensor:
        return ratios(p, q, tokens).clamp(max=1).cumprod(1)

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        if has_thresholds(tree):
            return laws_by_thresholds(tree, target_probs, leaf_to_root=False)
        return top_down(tree, target_probs)
