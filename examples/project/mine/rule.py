"""An acceptance rule that stops early."""

import torch
from torch import Tensor

from specdec import DraftTree, Laws
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

    def laws(self, tree: DraftTree, target_probs: Tensor) -> Laws:
        """Paths that would end further down end after ``most`` tokens."""
        laws = super().laws(tree, target_probs)
        stop = torch.zeros_like(laws.stop)
        stop[:, : self.most] = laws.stop[:, : self.most]
        stop[:, self.most : self.most + 1] = laws.stop[:, self.most :].sum(1, keepdim=True)

        def after(stop_nodes: Tensor) -> Tensor:
            """After ``most`` tokens nothing has been rejected, so the next token is drawn from p itself."""
            p = target_probs[torch.arange(len(stop_nodes), device=stop_nodes.device), stop_nodes]
            return torch.where((stop_nodes == self.most)[:, None], p, laws.after(stop_nodes))

        return Laws(stop, after)
