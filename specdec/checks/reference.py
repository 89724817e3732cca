"""A request's state and a cache for plain decoding that is written the slow and obvious way, over whole sequences."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdec.batch import Batch
from specdec.cache.formats import Format, check_format
from specdec.engine.processors import process
from specdec.engine.slot_table import SlotTable
from specdec.requests import Request, SamplingParams
from specdec.sampling import adjust, forbid_ends


def next_state(
    logits: Float[Tensor, " vocab"],
    sequence: Sequence[int],
    sampling: SamplingParams,
    *,
    prompt_length: int,
    stop_ids: frozenset[int] = frozenset(),
) -> tuple[Batch, Float[Tensor, " vocab"]]:
    """Return a request's state behind prompt and output, and the logits there with all but the filters, in float32."""
    table = SlotTable(1, len(sequence) + sampling.max_new_tokens, len(logits), logits.device)
    prompt, output = sequence[:prompt_length], list(sequence[prompt_length:])
    table.admit(0, Request(0, prompt, sampling.seeded(0), speculate=False, stop_ids=stop_ids, output_ids=output))
    state, tokens = table.rows(np.zeros(1, dtype=np.int64)), torch.tensor([list(sequence)], device=logits.device)
    scores = adjust(logits[None, None], state.sampling, tokens[:, None, -1:])
    scores = process(state.processors[0], tokens, scores[:, 0])[:, None]
    return state, forbid_ends(scores, state.sampling, torch.full_like(tokens[:, -1:], len(sequence) - 1))[0, 0]


class RoundedCache(DynamicCache):
    """transformers' growing cache, whose entries are rounded to a format when they are stored, and kept as numbers.

    ``shake``: how far numbers are moved at random before, as a fraction of the largest number in their vector. What
    lies that close to the border of two codes may then get either.
    """

    def __init__(self, model: PreTrainedModel, format: Format, *, shake: float = 0.0, seed: int = 0):
        super().__init__(config=model.config)
        self.format, self.shake = format, shake
        self._generator = torch.Generator(model.device).manual_seed(seed)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(self._rounded(key_states), self._rounded(value_states), layer_idx, *args, **kwargs)

    def _rounded(self, states: Tensor) -> Tensor:
        numbers = states
        if self.shake:
            noise = torch.rand(states.shape, generator=self._generator, device=states.device).mul_(2).sub_(1)
            numbers = states.float() + noise * (self.shake * states.float().abs().amax(-1, keepdim=True))
        return self.format.decode(*self.format.encode(numbers), states.dtype)


def cache_like(
    model: PreTrainedModel, kv_cache: str | None, *, shake: float = 0.0, seed: int = 0
) -> DynamicCache | None:
    """Return an empty ``RoundedCache`` that rounds as the engine's with ``kv_cache=``; None if that does not round."""
    format = check_format(kv_cache)
    return None if format is None else RoundedCache(model, format, shake=shake, seed=seed)
