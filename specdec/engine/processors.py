"""A user's logits processors, applied at every node of a draft tree on the node's own path.

transformers' processors take rows of equal length. The nodes of one depth make such rows: the sequence, then the
path to the node. So a processor sees what it would see in plain decoding, and the output stays exact, as long as the
processor depends on nothing but the tokens and scores that it is given (not on its calls or the number of its row).
This is a slow path: a call per request and depth, for each of which the host waits for the device.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.batch import Batch
from specdec.origin import described
from specdec.tree import DraftTree

Processor = Callable[[Tensor, Tensor], Tensor]
"""``processor(input_ids Int[row position], scores Float[row vocab]) -> Float[row vocab]``, as in transformers."""


def apply_processors(
    logits: Float[Tensor, "batch node vocab"], tree: DraftTree, batch: Batch
) -> Float[Tensor, "batch node vocab"]:
    """Returns float32 logits, penalized and not yet divided by the temperature, processed at every valid node.

    Rows whose processor raises are NaN, which ends their request, and ``batch.faults`` says why.
    """
    logits = logits.clone()
    batch.faults.clear()
    for row, processors in enumerate(batch.processors):
        if not processors:
            continue
        length = int(batch.on_host.lengths[row])
        before = torch.from_numpy(batch.on_host.tokens[row, :length]).long().to(logits.device)
        for depth in range(tree.max_depth + 1):
            nodes = torch.nonzero((tree.depth[row] == depth) & tree.valid[row])[:, 0]
            if not (count := len(nodes)):
                break
            # Nodes are numbered downwards, so a mask keeps a path's tokens in order.
            path = tree.tokens[row].expand(count, -1)[tree.ancestors[row, nodes]].view(count, depth + 1)
            given = torch.cat([before.expand(count, -1), path], dim=1)
            try:
                logits[row, nodes] = process(processors, given, logits[row, nodes])
            except Exception as error:  # it is the user's, and so is the request
                batch.faults[row], logits[row] = f"a logits processor failed: {described(error)}", torch.nan
                break
    return logits


def process(
    processors: Sequence[Processor], input_ids: Tensor, scores: Float[Tensor, "row vocab"]
) -> Float[Tensor, "row vocab"]:
    """Returns the scores after all processors, one after the other.

    Raises:
        ValueError: A processor has counted its calls, or returns scores of another shape (Torch would repeat a row).
    """
    for processor in processors:
        before = {key: value for key, value in getattr(processor, "__dict__", {}).items() if type(value) is int}
        processed = processor(input_ids, scores)
        name = getattr(processor, "__name__", type(processor).__name__)
        if any(vars(processor).get(key) != value for key, value in before.items()):
            raise ValueError(f"the logits processor {name} counts: let it depend on nothing but tokens and scores")
        if processed.shape != scores.shape:
            raise ValueError(
                f"the logits processor {name} returned scores of shape {list(processed.shape)} for "
                f"{list(scores.shape)}: return one row per row"
            )
        scores = processed
    return scores
