"""A drafter that repeats what followed the last time."""

import torch

from specdec import Batch, DraftSampling, DraftTree, StatelessDrafter, TreeShape


class RepeatDrafter(StatelessDrafter):
    """Proposes the tokens that followed the current token when it last occurred.

    Args:
        length: How many tokens to propose.

    Raises:
        ValueError: ``length`` is below 1.
    """

    laws = frozenset({DraftSampling.DETERMINISTIC})  # nothing is drawn at random
    is_chain = True
    reads_host = True  # it looks at the sequences on the host

    def __init__(self, length: int = 4):
        if length < 1:
            raise ValueError(f"length={length}: give at least 1")
        self.max_nodes = self.max_depth = length
        self.shape = TreeShape.chain(length)

    def propose(self, batch: Batch) -> DraftTree:
        """Look back in every row; a row where the current token is new proposes nothing."""
        nodes, valid = [], []
        for tokens, length in zip(batch.on_host.tokens, batch.on_host.lengths, strict=True):
            *before, root = tokens[: length + 1].tolist()
            earlier = [position for position, token in enumerate(before) if token == root]
            followed = [*before, root][earlier[-1] + 1 :][: self.max_depth] if earlier else []
            missing = self.max_depth - len(followed)
            nodes.append([root, *followed, *[root] * missing])
            valid.append([True, *[True] * len(followed), *[False] * missing])
        tree = torch.tensor(nodes, device=batch.device)
        return DraftTree.from_shape(self.shape, tree, valid=torch.tensor(valid, device=batch.device))
