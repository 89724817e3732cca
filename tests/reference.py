"""Plain decoding written the slow and obvious way: no cache, one forward over the whole sequence per token.

The engine must emit the same tokens in float32. The only code that the two share is the definition of the distribution
(``specdec.sampling``), the random numbers, and the format of a quantized KV cache.
"""

from collections.abc import Sequence
from inspect import signature

import torch
from transformers import PreTrainedModel

from specdec.cache.transformers_cache import cache_argument
from specdec.checks.reference import cache_like, next_state
from specdec.coupling import winners
from specdec.random import Purpose, draw, shared_noise, uniforms
from specdec.requests import SamplingParams
from specdec.sampling import distribution
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
