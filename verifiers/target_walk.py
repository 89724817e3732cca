"""Draws from the target walk down the tree: exact for any draft."""

from jaxtyping import Float
from torch import Tensor

from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.certain import laws_of_certain


class TargetWalkVerifier(Verifier):
    """Draws from p and goes down while the draw is a child; emits the first draw that is not a child.

    This is the acceptance of EAGLE-2 (Li et al. 2024, arXiv 2406.16858) and of n-gram drafts; called naive sampling
    in SpecInfer (Miao et al. 2023, arXiv 2305.09781). The draws do not depend on the tree, so the output follows
    the target however the tree was made: drafts may be sorted, pruned or selected after they were drawn, and drawn with
    another temperature or with noise that the target shares. The rule does not use q, so it accepts less than others
    where drafts were sampled. For ``DETERMINISTIC`` drafts it equals ``RejectionVerifier``.
    """

    exactness = Exactness.EXACT
    samplings = frozenset(DraftSampling)

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        """Draws from p lead down to a node and not further; the draw that is none of its children is emitted."""
        return laws_of_certain(tree, target_probs)
