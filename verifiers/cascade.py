"""Speculative cascades: rejection sampling towards a mixture of drafter and target. EXACT_WRT that mixture."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.arguments import number
from specdec.interfaces import Laws, Verifier
from specdec.sampling import one_hot_argmax
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.rejection import RejectionVerifier

_Rows = Float[Tensor, "*rows vocab"]
_OfAll = Float[Tensor, "*rows 1"]

Deferral = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Decides from p, q, their total variation and alpha which tokens of the drafter are kept: for all tokens at once (the
last axis has length 1) or token by token. The larger alpha, the more tokens are kept."""


def chow(p: _Rows, q: _Rows, distance: _OfAll, alpha: float) -> Bool[Tensor, "*rows 1"]:
    """Keep where the drafter is confident: max q ≥ 1 - alpha (equation 2)."""
    return q.amax(-1, keepdim=True) >= 1 - alpha


def diff(p: _Rows, q: _Rows, distance: _OfAll, alpha: float) -> Bool[Tensor, "*rows 1"]:
    """Keep where the target is hardly more confident: max q ≥ max p - alpha (equation 5)."""
    return q.amax(-1, keepdim=True) >= p.amax(-1, keepdim=True) - alpha


def opt(p: _Rows, q: _Rows, distance: _OfAll, alpha: float) -> Bool[Tensor, "*rows 1"]:
    """Keep where deferring is not worth its rejections: max q ≥ max p - alpha TV(p, q) (equation 10)."""
    return q.amax(-1, keepdim=True) >= p.amax(-1, keepdim=True) - alpha * distance


def token_v1(p: _Rows, q: _Rows, distance: _OfAll, alpha: float) -> Bool[Tensor, "*rows vocab"]:
    """Keep token x if q(x) ≥ max p - alpha (equation 13)."""
    return q >= p.amax(-1, keepdim=True) - alpha


def token_v2(p: _Rows, q: _Rows, distance: _OfAll, alpha: float) -> Bool[Tensor, "*rows vocab"]:
    """Keep token x if p(x) ≥ max p - alpha (equation 14)."""
    return p >= p.amax(-1, keepdim=True) - alpha


def token_v3(p: _Rows, q: _Rows, distance: _OfAll, alpha: float) -> Bool[Tensor, "*rows vocab"]:
    """Keep token x if p(x) ≥ (1 - alpha) max p (equation 15)."""
    return p >= (1 - alpha) * p.amax(-1, keepdim=True)


DEFERRALS: dict[str, Deferral] = {rule.__name__: rule for rule in (chow, diff, opt, token_v1, token_v2, token_v3)}


class CascadeVerifier(Verifier):
    """Speculative cascades (Narasimhan et al., ICLR 2025, arXiv 2405.19261).

    A deferral rule decides at every node which tokens the drafter may choose and which it leaves to the target. The
    output follows

        π(x) = q(x) k(x) + p(x) Σ_y q(y) (1 - k(y)),

    where k(x) is 1 for tokens that are kept and 0 for those that are deferred. If a rule keeps all tokens, π is q; if
    it keeps none, π is p. Rejection sampling towards π accepts more than towards p. It is exact with respect to π on
    chains and trees, because π at a node depends on the path alone. π is *not* the target's distribution.

    A token may follow any node, so q is needed at leaves, too: one more forward of the drafter in every round.

    The rules, and the numbers of their equations, are those of the paper as its authors' code cites them
    (google-research/speculative_cascades). So is the *greedy cascade* at temperature 0: p and q at temperature 1 decide
    k (only the total variation of ``opt`` is that of the two one-hot choices, 0 or 1), and the token is the drafter's
    or the target's most probable one. There is one difference: above temperature 0 the authors decide by the models'
    distributions at temperature 1, while this class decides by the p and q that tokens are drawn from, after
    temperature and filters. At temperature 1 without filters the two agree.

    Args:
        deferral: ``"chow"``, ``"diff"``, ``"opt"``, ``"token_v1"``, ``"token_v2"`` or ``"token_v3"``; or a function
            like these.
        alpha: The price of deferring to the target: the larger, the more tokens are the drafter's. The range from no
            token to all tokens is 0 to 1 for ``chow`` and ``token_v3``, -1 to 1 for ``diff`` and the other token rules,
            and unbounded for ``opt``.
    """

    exactness = Exactness.EXACT_WRT
    samplings = frozenset({DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})
    needs_leaf_probs = True

    def __init__(self, *, deferral: str | Deferral = "opt", alpha: float = 0.1):
        if not (deferral in DEFERRALS if isinstance(deferral, str) else callable(deferral)):
            raise ValueError(f"deferral={deferral!r}: choose {', '.join(DEFERRALS)}, or give a function")
        self.deferral = DEFERRALS[deferral] if isinstance(deferral, str) else deferral
        self.alpha = number("alpha", alpha, test=lambda value: not math.isnan(value))
        self._rule = RejectionVerifier()

    def stated_law(self, target_probs: _Rows, draft_probs: _Rows) -> _Rows:
        """Return π of sampled rows; p where q is zero."""
        return self._mixture(target_probs, draft_probs, target_probs, draft_probs)

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        return self._rule.laws(tree, self._stated(tree, target_probs))

    def _stated(
        self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]
    ) -> Float[Tensor, "batch node vocab"]:
        """Return π at every node; one-hot in greedy rows, whose nodes are all DETERMINISTIC."""
        if tree.draft_probs is None:
            return target_probs
        p, q = target_probs, tree.draft_probs.to(target_probs.dtype)
        greedy = (tree.law[:, -1] == DraftSampling.DETERMINISTIC)[:, None, None]
        drawn_p, drawn_q = (torch.where(greedy, one_hot_argmax(table), table) for table in (p, q))
        return self._mixture(p, q, drawn_p, drawn_q)

    def _mixture(self, p: _Rows, q: _Rows, drawn_p: _Rows, drawn_q: _Rows) -> _Rows:
        """Return π.

        Args:
            p: The target's distribution, as the deferral rule gets it.
            q: The drafter's distribution, as the deferral rule gets it.
            drawn_p: What the target's tokens are drawn from; one-hot at temperature 0.
            drawn_q: What the drafter's tokens are drawn from; one-hot at temperature 0.
        """
        distance = (drawn_q - drawn_p).clamp(min=0).sum(-1, keepdim=True)
        kept = self.deferral(p, q, distance, self.alpha)
        deferred = drawn_q.masked_fill(kept, 0.0).sum(-1, keepdim=True)
        mixture = drawn_q.masked_fill(~kept, 0.0) + deferred * drawn_p
        return mixture.where(q.sum(-1, keepdim=True) > 0, drawn_p)
