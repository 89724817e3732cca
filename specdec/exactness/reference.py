"""Plain decoding written the slow and obvious way: no cache, one forward over the whole sequence per token.

The engine must emit the same tokens in float32. The only code that the two share is the definition of the distribution
(``specdec.sampling``) and the random numbers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from specdec.batch import Batch
from specdec.coupling import winners
from specdec.engine.processors import process
from specdec.engine.slot_table import SlotTable
from specdec.exactness.rounded_cache import cache_like
from specdec.random import Purpose, draw, shared_noise, uniforms
from specdec.requests import SamplingParams
from specdec.sampling import adjust, distribution
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

    Args:
        model: The target.
        prompt_ids: At least one token.
        sampling: How to sample; its seed and stream give the engine's random numbers (``stream=None`` counts as 0).
        stop_ids: Tokens that end the output.
        noise: The noise of the verifier with which the engine is compared.
        kv_cache: The format in which the engine stores keys and values; here they are rounded to it.
    """
    sampling = sampling.seeded(0)
    sequence = list(prompt_ids)
    for step in range(sampling.max_new_tokens):
        cache = cache_like(model, kv_cache)
        logits = model(torch.tensor([sequence], device=model.device), past_key_values=cache).logits[:, -1:]
        state = _state(sequence, sampling, logits.shape[2], model.device)
        p = distribution(_scores(logits, sequence, state)[None, None], state.sampling)
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


def next_scores(
    logits: Float[Tensor, "batch node vocab"], sequence: Sequence[int], sampling: SamplingParams
) -> Float[Tensor, " vocab"]:
    """Return the logits that follow a sequence with repetition penalty and logits processors applied, in float32.

    Args:
        logits: The model's, of one row and one node.
        sequence: All tokens before.
        sampling: The request's parameters.
    """
    state = _state(sequence, sampling.seeded(0), logits.shape[2], logits.device)
    return _scores(logits, sequence, state)


def _state(sequence: Sequence[int], sampling: SamplingParams, vocab_size: int, device: torch.device) -> Batch:
    """Return the state of a request that has come as far as the end of a sequence."""
    table = SlotTable(1, len(sequence) + sampling.max_new_tokens, vocab_size, device)
    table.admit(0, sequence, sampling, speculate=False)
    return table.rows(np.zeros(1, dtype=np.int64))


def _scores(
    logits: Float[Tensor, "batch node vocab"], sequence: Sequence[int], state: Batch
) -> Float[Tensor, " vocab"]:
    tokens = torch.tensor([list(sequence)], device=logits.device)
    scores = adjust(logits, state.sampling, tokens[:, None, -1:])
    return process(state.processors[0], tokens, scores[:, 0])[0]
