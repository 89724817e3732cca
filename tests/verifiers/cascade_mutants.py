"""Cascades with a mistake, which every test of the output law must reject."""

from torch import Tensor

from specdec.interfaces import Laws
from specdec.tree import DraftTree
from tests.changed_rule import ChangedRule, emit_p
from verifiers import CascadeVerifier, RejectionVerifier


def _after_leaves(tree: DraftTree, target_probs: Tensor, laws: Laws, stop: Tensor) -> Tensor:
    leaf = ~((tree.parents == stop[:, None]) & tree.valid).any(1, keepdim=True)
    return emit_p(tree, target_probs, laws, stop).where(leaf, laws.after(stop))


def target_after_leaves(**options: object) -> ChangedRule:
    """Without q at the leaves, a path that ends at one goes on with p."""
    return ChangedRule(CascadeVerifier(**options), after=_after_leaves)


def residual_of_the_target(**options: object) -> ChangedRule:
    """Accepts towards the mixture, and emits what is left of p."""
    return ChangedRule(
        CascadeVerifier(**options), after=lambda tree, p, laws, stop: RejectionVerifier().laws(tree, p).after(stop)
    )


def accepts_towards_the_target(**options: object) -> ChangedRule:
    """Accepts towards p, and emits what is left of the mixture."""
    return ChangedRule(CascadeVerifier(**options), stop=lambda tree, p, laws: RejectionVerifier().laws(tree, p).stop)
