"""Verification towards a mixture of drafter and target: speculative cascades, and constant shares. EXACT_WRT it."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specdec.arguments import number
from specdec.interfaces import Laws, Verifier
from specdec.sampling import one_hot_argmax
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.rejection import RejectionVerifier

_Rows = Float[Tensor, "*rows vocab"]
_Table = Float[Tensor, "batch node vocab"]

Deferral = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Decides from p, q, their total variation and alpha which tokens of the drafter are kept: for all tokens at once (the
last axis has length 1) or token by token. The larger alpha, the more tokens are kept."""


def _top(table: _Rows) -> Float[Tensor, "*rows 1"]:
    return table.amax(-1, keepdim=True)


DEFERRALS: dict[str, Deferral] = {
    # For all tokens at once: where the drafter is confident (equation 2), where the target is hardly more confident
    # (equation 5), and where deferring is not worth its rejections (equation 10).
    "chow": lambda p, q, distance, alpha: _top(q) >= 1 - alpha,
    "diff": lambda p, q, distance, alpha: _top(q) >= _top(p) - alpha,
    "opt": lambda p, q, distance, alpha: _top(q) >= _top(p) - alpha * distance,
    # Token by token (equations 13 to 15).
    "token_v1": lambda p, q, distance, alpha: q >= _top(p) - alpha,
    "token_v2": lambda p, q, distance, alpha: p >= _top(p) - alpha,
    "token_v3": lambda p, q, distance, alpha: p >= (1 - alpha) * _top(p),
}


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
    distributions at temperature 1, this class by the p and q that tokens are drawn from.

    Args:
        deferral: ``"chow"``, ``"diff"``, ``"opt"``, ``"token_v1"``, ``"token_v2"`` or ``"token_v3"``; or a function
            like these, whose k may be shares between 0 and 1.
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

    def laws(self, tree: DraftTree, target_probs: _Table) -> Laws:
        if tree.draft_probs is None:
            return self._rule.laws(tree, target_probs)
        p, q, greedy = target_probs, tree.draft_probs.to(target_probs.dtype), _greedy(tree)
        drawn_p, drawn_q = (torch.where(greedy, one_hot_argmax(table), table) for table in (p, q))
        return self._rule.laws(tree, self._mixture(p, q, drawn_p, drawn_q))

    def _mixture(self, p: _Rows, q: _Rows, drawn_p: _Rows, drawn_q: _Rows) -> _Rows:
        """Return π: p and q decide which tokens are kept; what tokens are drawn from is one-hot at temperature 0."""
        distance = (drawn_q - drawn_p).clamp(min=0).sum(-1, keepdim=True)
        law = mixture(drawn_p, drawn_q, self.deferral(p, q, distance, self.alpha))
        return law.where(q.sum(-1, keepdim=True) > 0, drawn_p)


class MixtureVerifier(Verifier):
    """Static ensemble verification (DIVERSED, arXiv 2604.07622): π = w p + (1 - w) q, with w the target's share.

    It is the cascade whose k is 1 - w for every token. As [π - q]+ = w [p - q]+, a sampled token x is accepted with
    probability min(1, 1 - w + w p(x) / q(x)), and a rejection is followed by a draw from N([p - q]+).
    transformers (from 5.14) has w as ``assistant_ensemble_weight``, but draws the token after a draft that was accepted
    whole from p; here that token follows π as well, so the law does not depend on where drafts end. At temperature 0
    it is the most probable token of π at temperature 1, as there.

    Args:
        target_share: w, in [0, 1]; 1 is rejection sampling, 0 keeps every draft.
    """

    exactness = Exactness.EXACT_WRT
    samplings = CascadeVerifier.samplings
    needs_leaf_probs = True

    def __init__(self, *, target_share: float = 0.7):
        remedy = "give the target's share in [0, 1]; 1 is rejection sampling"
        self.target_share = number("target_share", target_share, remedy, lambda value: 0 <= value <= 1)
        self._rule = RejectionVerifier()

    def stated_law(self, target_probs: _Rows, draft_probs: _Rows) -> _Rows:
        """Return π; p where q is zero."""
        law = mixture(target_probs, draft_probs, 1 - self.target_share)
        return law.where(draft_probs.sum(-1, keepdim=True) > 0, target_probs)

    def laws(self, tree: DraftTree, target_probs: _Table) -> Laws:
        if tree.draft_probs is None:
            return self._rule.laws(tree, target_probs)
        law = self.stated_law(target_probs, tree.draft_probs.to(target_probs.dtype))
        return self._rule.laws(tree, torch.where(_greedy(tree), one_hot_argmax(law), law))


def mixture(p: _Rows, q: _Rows, kept: Tensor | float) -> _Rows:
    """Return q k + p Σ q (1 - k) for the shares k of the drafter's tokens that are kept."""
    mine = q * kept
    return mine + (q - mine).sum(-1, keepdim=True) * p


def _greedy(tree: DraftTree) -> Tensor:
    """Return which rows are greedy: all of their nodes are DETERMINISTIC."""
    return (tree.law[:, -1] == DraftSampling.DETERMINISTIC)[:, None, None]


def ensemble_head(path: str | Path, *, drafter: int, target: int) -> nn.Linear:
    """Load DIVERSED's ``ensemble_head.bin``, which says the shares of a mixture node by node.

    Of the last hidden states of both models (``drafter`` and ``target`` are their widths), the drafter's first,
    ``head(states).softmax(-1)`` is 1 - w and w. Assumed, as the paper's rule has it: w mixes probabilities. The
    published training mixes logits. A rule is shown no hidden states, so no request is served by a head yet; its 1 - w
    can be the k of a cascade, which is exact with respect to that mixture.
    """
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        found = {name: stored[f"summary.{name}"].float() for name in ("weight", "bias")}
    except (OSError, EOFError, KeyError, TypeError, AttributeError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} holds no summary.weight and summary.bias: give an ensemble_head.bin") from error
    if found["weight"].shape != (2, drafter + target):
        raise ValueError(
            f"{path} has weights of shape {list(found['weight'].shape)}, and hidden states of {drafter} and {target} "
            f"numbers need [2, {drafter + target}]: give the head that was trained for this pair of models"
        )
    head = nn.Linear(drafter + target, 2)
    head.load_state_dict(found)
    return head
