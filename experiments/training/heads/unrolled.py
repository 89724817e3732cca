"""EAGLE-3's training-time test: a head that reads its own outputs is trained on them (arXiv 2503.01840, section 3.2).

A draft's step i reads the head's own output of step i − 1 in place of the target's state. All drafts of a row are run
together: step i of the draft at position t is row t of the i-th forward. It sees what the engine's cache would hold for
it: the true pairs up to t (step 0's keys, causal), and its own pairs of steps 1 … i, each of which is one key.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "specdec_unrolled"
"""The name under which transformers' layers find ``unrolled_attention``."""


def unrolled_attention(
    module: nn.Module,
    query: Float[Tensor, "batch head node head_dim"],
    key: Float[Tensor, "batch kv_head keys head_dim"],
    value: Float[Tensor, "batch kv_head keys head_dim"],
    attention_mask: Float[Tensor, "batch 1 node node"],
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch node head head_dim"], None]:
    """Attends to step 0's keys under the mask, and to the query's own key of every later step.

    The keys of the steps stand one behind the other, so that their number is a multiple of the queries'. With three
    positions and two steps, the query of position 1 sees the keys 0, 1 (step 0) and 4 (its own of step 1), out of six.
    """
    count = query.shape[2]
    groups = query.shape[1] // key.shape[1]
    factor = query.shape[3] ** -0.5 if scaling is None else scaling
    precise = torch.promote_types(query.dtype, torch.float32)
    q = query.unflatten(1, (key.shape[1], groups)) * factor
    first_k, first_v = key[:, :, None, :count], value[:, :, None, :count]
    scores = _capped(q @ first_k.transpose(-1, -2), softcap) + attention_mask[:, :, None]
    steps = key.shape[2] // count - 1
    if steps:
        own_k = key[:, :, count:].unflatten(2, (steps, count))
        own_v = value[:, :, count:].unflatten(2, (steps, count))
        own = torch.einsum("bkgtd,bkitd->bkgti", q, own_k)
        scores = torch.cat([scores, _capped(own, softcap)], -1)
        weights = scores.softmax(-1, dtype=precise).to(query.dtype)
        out = weights[..., :count] @ first_v + torch.einsum("bkgti,bkitd->bkgtd", weights[..., count:], own_v)
    else:
        out = scores.softmax(-1, dtype=precise).to(query.dtype) @ first_v
    return out.flatten(1, 2).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the attention known to transformers."""
    AttentionInterface.register(ATTENTION, unrolled_attention)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap
