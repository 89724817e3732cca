"""Acceptance rules with a mistake: how tests state what they must be able to reject."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec import DraftSampling, DraftTree, Exactness, Laws, Verifier
from verifiers import RejectionVerifier
from verifiers.walk import TryChildren


class ChangedRule(Verifier):
    """A rule with one of its two distributions replaced."""

    def __init__(
        self,
        rule: Verifier,
        *,
        stop: Callable[[DraftTree, Tensor, Laws], Tensor] | None = None,
        after: Callable[[DraftTree, Tensor, Laws, Tensor], Tensor] | None = None,
    ):
        self.rule, self.stop, self.after = rule, stop, after
        self.exactness, self.samplings, self.noise = rule.exactness, rule.samplings, rule.noise
        self.chain_only, self.paths_only = rule.chain_only, rule.paths_only
        self.needs_leaf_probs = rule.needs_leaf_probs

    def stated_law(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        return self.rule.stated_law(target_probs, draft_probs)

    def laws(self, tree: DraftTree, target_probs: Tensor) -> Laws:
        laws, after = self.rule.laws(tree, target_probs), self.after
        return Laws(
            laws.stop if self.stop is None else self.stop(tree, target_probs, laws),
            laws.after if after is None else lambda nodes: after(tree, target_probs, laws, nodes),
        )


class WalkedRule(Verifier):
    """A rule of one's own, by what it does with the children of some nodes."""

    exactness = Exactness.EXACT
    samplings = frozenset(set(DraftSampling) - {DraftSampling.COUPLED})

    def __init__(self, walk: Callable[..., Laws], try_children: TryChildren):
        self.walk, self.try_children = walk, try_children

    def laws(self, tree: DraftTree, target_probs: Tensor) -> Laws:
        return self.walk(tree, target_probs, self.try_children)


def emit_p(tree: DraftTree, target_probs: Tensor, laws: Laws, stop: Tensor) -> Tensor:
    """The commonest mistake: after a rejection, the next token is drawn from p instead of the residual."""
    return target_probs[torch.arange(len(stop)), stop]


def accept_the_first(tree: DraftTree, target_probs: Tensor, laws: Laws) -> Tensor:
    """The root's first child is always accepted."""
    stop = laws.stop.clone()
    stop[:, 1] += stop[:, 0]
    stop[:, 0] = 0
    return stop


IGNORES_THE_PATH = ChangedRule(
    RejectionVerifier(),
    stop=lambda tree, p, laws: RejectionVerifier().laws(tree, p[:, :1].expand_as(p).contiguous()).stop,
)
"""Every node is judged by the root's distribution."""
