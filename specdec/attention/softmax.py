"""From scores to attention weights: softcap, mask, sinks."""

import torch
from jaxtyping import Float
from torch import Tensor


def attention_weights(
    scores: Float[Tensor, "batch kv_head rows key"],
    mask: Float[Tensor, "batch mask_head rows key"],
    *,
    softcap: float | None,
    sinks: Float[Tensor, "batch kv_head rows 1"] | None,
) -> Float[Tensor, "batch kv_head rows key"]:
    """Returns the weights of the values, in float32.

    Args:
        scores: Scaled products of queries and keys.
        mask: Additive.
        softcap: Scores become ``softcap * tanh(scores / softcap)`` before the mask; None leaves them.
        sinks: A logit per row that takes part in the softmax and has no value; None for none.
    """
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = (scores + mask).float()
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
