"""An acceptance rule that stops early."""

import torch
from torch import Tensor

from specdec import DraftTree
from verifiers import RejectionVerifier


class CautiousVerifier(RejectionVerifier):
    """Rejection sampling that accepts at most ``most`` tokens of a chain.

    It is still exact, because it does what rejection sampling does on a shorter draft.

    Args:
        most: The largest number of tokens to accept in a round.

    Raises:
        ValueError: ``most`` is below 1.
    """

    chain_only = True

    def __init__(self, most: int = 2):
        if most < 1:
            raise ValueError(f"most={most}: give at least 1")
        super().__init__()
        self.most = most

    def stop_law(self, tree: DraftTree, target_probs: Tensor) -> Tensor:
        """Paths that would end further down end after ``most`` tokens."""
        law = super().stop_law(tree, target_probs)
        cut = torch.zeros_like(law)
        cut[:, : self.most] = law[:, : self.most]
        cut[:, self.most : self.most + 1] = law[:, self.most :].sum(1, keepdim=True)
        return cut

    def next_law(self, tree: DraftTree, target_probs: Tensor, stop: Tensor) -> Tensor:
        """After ``most`` tokens nothing has been rejected, so the next token is drawn from p itself."""
        law = super().next_law(tree, target_probs, stop)
        row = torch.arange(len(stop), device=stop.device)
        return torch.where((stop == self.most)[:, None], target_probs[row, stop], law)
