"""Cascades with a mistake, which every test of the output law must reject."""

import torch
from torch import Tensor

from specdec.tree import DraftTree
from verifiers import CascadeVerifier


class TargetAfterLeaves(CascadeVerifier):
    """Mutant: without q at the leaves, a path that ends at one goes on with p."""

    def next_law(self, tree: DraftTree, target_probs: Tensor, stop: Tensor) -> Tensor:
        leaf = ~((tree.parents == stop[:, None]) & tree.valid).any(1, keepdim=True)
        return target_probs[torch.arange(len(stop)), stop].where(leaf, super().next_law(tree, target_probs, stop))


class ResidualOfTheTarget(CascadeVerifier):
    """Mutant: accepts towards the mixture, and emits what is left of p."""

    def next_law(self, tree: DraftTree, target_probs: Tensor, stop: Tensor) -> Tensor:
        return self._rule.laws(tree, target_probs).after(stop)


class AcceptsTowardsTheTarget(CascadeVerifier):
    """Mutant: accepts towards p, and emits what is left of the mixture."""

    def stop_law(self, tree: DraftTree, target_probs: Tensor) -> Tensor:
        return self._rule.laws(tree, target_probs).stop
