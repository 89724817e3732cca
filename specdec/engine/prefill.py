"""Puts prompts into the cache, one chunk at a time."""

from collections.abc import Sequence

import numpy as np
import torch

from specdec.forward import ForwardBatch
from specdec.requests import Request
from specdec.target.runner import ModelRunner
from specdec.types import Committed


def prefill(
    runner: ModelRunner, requests: Sequence[Request], *, chunk: int, hidden_layers: tuple[int, ...] = ()
) -> Committed:
    """Append the next chunk of some prompts to their slots, all in one forward.

    The last token of a prompt is left out: it is the root of the first round.

    Args:
        runner: Runs the model.
        requests: Requests that have a slot, and tokens left before their last one.
        chunk: The largest number of tokens per prompt.
        hidden_layers: Hidden states to return.

    Returns:
        What was appended: one row per request, in their order.
    """
    starts = np.array([request.prefilled for request in requests])
    counts = np.array([min(chunk, len(request.prompt_ids) - 1 - request.prefilled) for request in requests])
    padded = np.zeros((len(requests), counts.max()), dtype=np.int64)
    following = np.zeros(len(requests), dtype=np.int64)
    for row, (request, start, count) in enumerate(zip(requests, starts, counts, strict=True)):
        padded[row, :count] = request.prompt_ids[start : start + count]
        following[row] = request.prompt_ids[start + count]
    slots = np.array([request.slot for request in requests])
    batch = ForwardBatch.of_chunk(
        torch.from_numpy(padded).to(runner.device, non_blocking=True),
        host_slots=slots,
        host_lengths=starts,
        hidden_layers=hidden_layers,
    )
    output = runner.run(batch)
    assert batch.tokens is not None
    return Committed(
        slots=batch.slots,
        host_slots=slots,
        tokens=batch.tokens,
        starts=starts,
        counts=counts,
        next_tokens=torch.from_numpy(following).to(runner.device, non_blocking=True),
        path=None,
        hidden_states=output.hidden_states,
    )
