"""Plain decoding written the slow and obvious way: no cache, one forward over the whole sequence per token.

The engine must emit the same tokens in float32. The only code that the two share is the definition of the distribution
(``specdec.sampling``), the random numbers, and the format of a quantized KV cache.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdec.batch import Batch
from specdec.cache.formats import Format, check_format
from specdec.cache.transformers_cache import cache_argument
from specdec.coupling import winners
from specdec.engine.processors import process
from specdec.engine.slot_table import SlotTable
from specdec.random import Purpose, draw, shared_noise, uniforms
from specdec.requests import Request, SamplingParams
from specdec.sampling import adjust, distribution, forbid_ends
from specdec.types import Noise


@torch.inference_mode()
def reference_decode(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    stop_ids: frozenset[int] = frozenset(),
    noise: Noise = Noise.FRESH,
    kv_cache: str | None = None,
) -> list[int]:
    """Return the tokens of plain decoding, cut after a stop token; ignores the strings in ``sampling.stop``.

    Its seed and stream give the engine's random numbers. ``noise`` is that of the verifier with which the engine is
    compared, ``kv_cache`` the format in which it stores keys and values; here they are rounded to it.
    """
    sampling = sampling.seeded(0)
    sequence, name = list(prompt_ids), cache_argument(signature(type(model).forward).parameters)
    for step in range(sampling.max_new_tokens):
        cache = cache_like(model, kv_cache)
        logits = model(torch.tensor([sequence], device=model.device), **{name: cache}).logits[0, -1]
        state, scores = next_state(logits, sequence, sampling, prompt_length=len(prompt_ids), stop_ids=stop_ids)
        p = distribution(scores[None, None], state.sampling)
        if noise is Noise.SHARED:
            here = torch.full_like(state.keys, len(sequence))[:, None]
            token = winners(p, shared_noise(state.keys, here, p.shape[2])).argmax()
        else:
            # A round draws its stop node with the first uniform and the next token with the second.
            u = uniforms(state.keys, torch.full_like(state.keys, step), Purpose.ACCEPT, 2)
            token = draw(p[:, 0], u[:, 1])
        sequence.append(int(token))
        if sequence[-1] in stop_ids:
            break
    return sequence[len(prompt_ids) :]


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
