"""A user's logits processors, applied at every node of a draft tree on the node's own path.

transformers' processors take rows of equal length. The nodes of one depth make such rows: the sequence, then the
path to the node. A processor therefore sees at a node exactly what it would see in plain decoding, so the output
stays exact; it must be a function of the tokens and scores it is given (one that counts its calls is not).

This is a slow path: one call per request and depth, and a synchronization of host and device for each. Temperature,
top-k, top-p, min-p and the repetition penalty do not take it.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.slots import Slots
from specdec.tree import DraftTree

Processor = Callable[[Tensor, Tensor], Tensor]
"""``processor(input_ids Int[row position], scores Float[row vocab]) -> Float[row vocab]``, as in transformers."""


def apply_processors(
    logits: Float[Tensor, "batch node vocab"], tree: DraftTree, slots: Slots
) -> Float[Tensor, "batch node vocab"]:
    """Logits with every row's processors applied at its valid nodes.

    Args:
        logits: After penalties, before temperature (transformers' order); float32.
        tree: What is verified; a root-only tree in plain decoding.
        slots: The rows, with their processors and sequences.
    """
    logits = logits.clone()
    for row, processors in enumerate(slots.processors):
        if not processors:
            continue
        length = int(slots.host_lengths[row])
        before = torch.from_numpy(slots.host_tokens[row, :length]).long().to(logits.device)
        for depth in range(tree.max_depth + 1):
            nodes = torch.nonzero((tree.depth[row] == depth) & tree.valid[row])[:, 0]
            count = len(nodes)
            if count == 0:
                break
            # Nodes are numbered downwards, so a mask keeps a path's tokens in order.
            path = tree.tokens[row].expand(count, -1)[tree.ancestors[row, nodes]].view(count, depth + 1)
            scores = logits[row, nodes]
            logits[row, nodes] = process(processors, torch.cat([before.expand(count, -1), path], dim=1), scores)
    return logits


def process(
    processors: Sequence[Processor], input_ids: Tensor, scores: Float[Tensor, "row vocab"]
) -> Float[Tensor, "row vocab"]:
    """One after the other."""
    for processor in processors:
        scores = processor(input_ids, scores)
    return scores
