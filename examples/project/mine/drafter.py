"""A drafter that repeats what followed the last time."""

import torch

from specdec import Batch, Drafter, DraftSampling, DraftTree, Target, TreeShape


class RepeatDrafter(Drafter):
    """Proposes the tokens that followed the current token when it last occurred.

    Args:
        length: How many tokens to propose.

    Raises:
        ValueError: ``length`` is below 1.
    """

    laws = frozenset({DraftSampling.DETERMINISTIC})  # nothing is drawn at random
    is_chain = True

    def __init__(self, length: int = 4):
        if length < 1:
            raise ValueError(f"length={length}: give at least 1")
        self.max_nodes = self.max_depth = length
        self.shape = TreeShape.chain(length)

    def bind(self, target: Target, *, max_batch_size: int, max_length: int) -> None:
        """Nothing to prepare: this drafter has no state and fits every target."""

    def propose(self, slots: Batch) -> DraftTree:
        """Look back in every row; a row where the current token is new proposes nothing."""
        nodes, valid = [], []
        for tokens, length in zip(slots.host_tokens, slots.host_lengths, strict=True):
            *before, root = tokens[: length + 1].tolist()
            earlier = [position for position, token in enumerate(before) if token == root]
            followed = [*before, root][earlier[-1] + 1 :][: self.max_depth] if earlier else []
            missing = self.max_depth - len(followed)
            nodes.append([root, *followed, *[root] * missing])
            valid.append([True, *[True] * len(followed), *[False] * missing])
        tree = torch.tensor(nodes, device=slots.device)
        return DraftTree.from_shape(self.shape, tree, valid=torch.tensor(valid, device=slots.device))
