"""Plain decoding written the slow and obvious way: no cache, one forward over the whole sequence per token.

The engine must emit the same tokens in float32. The only code that the two share is the definition of the distribution
(``specdec.sampling``) and the random numbers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from specdec.coupling import winners
from specdec.engine.processors import process
from specdec.engine.slot_table import SlotTable
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
) -> list[int]:
    """Returns the tokens of plain decoding, cut after a stop token; ignores the strings in ``sampling.stop``.

    Args:
        model: The target.
        prompt_ids: At least one token.
        sampling: How to sample; its seed and stream give the engine's random numbers (``stream=None`` counts as 0).
        stop_ids: Tokens that end the output.
        noise: The noise of the verifier with which the engine is compared.
    """
    sampling = sampling.seeded(0)
    sequence = list(prompt_ids)
    output = model.get_output_embeddings()
    assert output is not None, "a causal LM has one"
    length = len(sequence) + sampling.max_new_tokens
    for step in range(sampling.max_new_tokens):
        table = SlotTable(1, length, output.weight.shape[0], model.device)
        table.admit(0, sequence, sampling, speculate=False)
        state = table.rows(np.zeros(1, dtype=np.int64))
        tokens = torch.tensor([sequence], device=model.device)
        logits = model(tokens).logits[:, -1:]
        scores = adjust(logits, state.sampling, tokens[:, None, -1:])
        scores = process(sampling.processors, tokens, scores[:, 0])[:, None]
        p = distribution(scores, state.sampling)
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


@torch.inference_mode()
def top_two_margin(model: PreTrainedModel, sequence: Sequence[int], repetition_penalty: float = 1.0) -> float:
    """Returns the difference of the two largest next-token logits after ``sequence``, in nats, from one plain forward.

    Near zero, greedy decoding could go either way in this dtype: a difference of outputs there is a tie and not a bug.
    """
    tokens = torch.tensor([list(sequence)], device=model.device)
    logits = model(tokens).logits[0, -1].float()
    seen = logits[tokens[0]]
    logits[tokens[0]] = torch.where(seen > 0, seen / repetition_penalty, seen * repetition_penalty)
    first, second = np.asarray(logits.topk(2).values.cpu())
    return float(first - second)
