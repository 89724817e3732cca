"""Draws from the target walk down the tree: exact for any draft."""

from dataclasses import replace

from jaxtyping import Float, Int
from torch import Tensor

from specdec.interfaces import Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.rejection import RejectionVerifier


class TargetWalkVerifier(Verifier):
    """Draws from p and goes down while the draw is a child; emits the first draw that is not a child.

    This is the acceptance of EAGLE-2 (Li et al. 2024, arXiv 2406.16858) and of n-gram drafts; called naive sampling
    in SpecInfer (Miao et al. 2023, arXiv 2305.09781). The draws do not depend on the tree, so the output follows
    the target however the tree was made: drafts may be sorted, pruned or selected after they were drawn, and drawn with
    another temperature or with noise that the target shares. The rule does not use q, so it accepts less than others
    where drafts were sampled. For ``DETERMINISTIC`` drafts it equals ``RejectionVerifier``.
    """

    exactness = Exactness.EXACT
    laws = frozenset(DraftSampling)

    def __init__(self):
        self._rule = RejectionVerifier()

    def stop_law(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Float[Tensor, "batch node"]:
        """Probability that draws from p lead down to each node and not further."""
        return self._rule.stop_law(_without_q(tree), target_probs)

    def next_law(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch node vocab"],
        stop: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch vocab"]:
        """Law of a draw from p that is none of the children: this draw itself is emitted, not a new one."""
        return self._rule.next_law(_without_q(tree), target_probs, stop)


def _without_q(tree: DraftTree) -> DraftTree:
    """Returns the tree without q, as if every node had been chosen without randomness."""
    stripped = replace(tree, draft_probs=None)
    known = vars(tree)
    vars(stripped).update(
        {name: known[name] for name in ("parents", "depth", "ancestors", "children") if name in known}
    )
    return stripped
