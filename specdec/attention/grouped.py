"""Grouped-query attention that reads each key and value head once.

Transformers' SDPA path copies K and V to the number of query heads whenever there is a mask and more than one
query. Here the query heads of a group are laid along the query axis instead: the same products, no copy. Logit
softcapping (Gemma-2) and attention sinks (gpt-oss), which SDPA refuses, run as plain matrix products.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

NAME = "specdec_grouped"


def grouped_attention(
    module: nn.Module,
    query: Float[Tensor, "batch head query head_dim"],
    key: Float[Tensor, "batch kv_head key head_dim"],
    value: Float[Tensor, "batch kv_head key value_dim"],
    attention_mask: Float[Tensor, "batch 1 rows key"],
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " head"] | None = None,
    **kwargs: object,
) -> tuple[Float[Tensor, "batch query head value_dim"], None]:
    """An attention function in the form of transformers' ``AttentionInterface``.

    Args:
        module: The attention layer; not used.
        query: One row per query head.
        key: Not repeated.
        value: Not repeated.
        attention_mask: Additive; ``rows`` is either query, or head / kv_head x query, head-major.
        scaling: Factor of the scores; ``head_dim ** -0.5`` when None.
        softcap: Scores become ``softcap * tanh(scores / softcap)`` before the mask.
        s_aux: Attention sinks, one logit per head that takes part in the softmax and has no value.
        **kwargs: Position ids and the like, which the mask has already.
    """
    batch, heads, queries, head_dim = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(batch, key.shape[1], groups * queries, head_dim)
        if attention_mask.shape[2] != groups * queries:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    if softcap is None and s_aux is None:
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling
        )
    else:
        scores = query @ key.transpose(2, 3) * (head_dim**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = (scores + attention_mask).float()
        if s_aux is not None:
            sinks = s_aux.float().view(1, key.shape[1], groups, 1, 1).expand(batch, -1, -1, queries, 1)
            scores = torch.cat([scores, sinks.reshape(batch, key.shape[1], groups * queries, 1)], dim=-1)
            weights = scores.softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        output = weights.to(value.dtype) @ value
    return output.reshape(batch, heads, queries, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
# Our masks are complete when the model gets them; this entry only makes transformers hand them through.
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
