"""Log-probabilities of a prompt's own tokens, from one forward over all of it."""

from dataclasses import replace

import numpy as np
import torch

from specdec.filters import largest
from specdec.forward import LOGITS, ForwardBatch
from specdec.target.facts import make_cache
from specdec.target.runner import ModelRunner

Told = dict[int, tuple[float, int]]
"""By token, its log-probability and its rank, 1 for the likeliest: at one place of a prompt."""
_AT_ONCE = 64
"""Places whose log-probabilities are computed together, which bounds the memory."""


@torch.inference_mode()
def told(runner: ModelRunner, prompt: list[int], alternatives: int, adapter: int = 0) -> list[Told]:
    """Return what the model says of every token of a prompt but the first: the likeliest ones, and the token itself.

    The forward has a cache of its own, so no request notices.

    Args:
        alternatives: The number of likeliest tokens.
        adapter: The number of the adapter that the prompt goes through; 0 for none.
    """
    if len(prompt) == 1:
        return []
    tokens = torch.tensor([prompt[:-1]], device=runner.device)
    zeros = np.zeros(1, dtype=np.int64)
    batch = ForwardBatch.of_chunk(tokens, host_slots=zeros, host_lengths=zeros)
    batch = replace(batch, wants=LOGITS, adapters=torch.full_like(tokens, adapter))
    cache = make_cache(runner.facts, max_batch_size=1, max_length=len(prompt), max_nodes=0, kv_cache=runner.kv_cache)
    logits = runner.run(batch, cache).scores[0]
    found: list[Told] = []
    for places, own in zip(logits.split(_AT_ONCE), torch.tensor(prompt[1:]).split(_AT_ONCE), strict=True):
        laws = places.to(torch.promote_types(places.dtype, torch.float32)).log_softmax(-1)
        chosen = laws.gather(1, own[:, None].to(laws.device))
        ranks = 1 + (laws > chosen).sum(-1)
        values, likeliest = largest(laws, max(alternatives, 1))
        for place in zip(*(each.tolist() for each in (likeliest, values, own, chosen[:, 0], ranks)), strict=True):
            names, figures, token, value, rank = place
            pairs = zip(names[:alternatives], figures[:alternatives], range(1, alternatives + 1), strict=True)
            found.append({token: (value, rank)} | {name: (figure, at) for name, figure, at in pairs})
    return found
