"""Attention over quantized keys and values on a CPU, without ever having all of them decoded.

A key's factor is the same for all of its numbers, so it can be applied to the score in place of the key; a value's
factor, to the weight in place of the value. What is left is to convert codes to float32. That is done for a block of
heads at a time, which stays in the processor's cache: from memory come bytes.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.attention.softmax import attention_weights
from specdec.cache.quantized_tensor import QuantizedTensor

BLOCK = 2**18
"""Numbers of a block: 1 MB of keys in float32."""
MOST_ROWS = 128
"""Rows of queries per key head up to which scores are kept for all keys. Prefill has more, and decodes all keys, whose
number is then small against that of the scores."""


def reads_codes(query: Float[Tensor, "batch kv_head rows head_dim"]) -> bool:
    """Returns whether ``attend_codes`` is the faster way for these queries, and as precise as they are."""
    return query.device.type == "cpu" and query.shape[2] <= MOST_ROWS and query.dtype is not torch.float64


def attend_codes(
    query: Float[Tensor, "batch kv_head rows head_dim"],
    keys: QuantizedTensor,
    values: QuantizedTensor,
    mask: Float[Tensor, "batch mask_head rows key"],
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: Float[Tensor, "batch kv_head rows 1"] | None,
) -> Float[Tensor, "batch kv_head rows value_dim"]:
    """Returns attention's output in the queries' dtype; products and softmax are float32's.

    Args:
        query: All rows that share a key head.
        keys: ``[batch, kv_head, key, head_dim]``.
        values: ``[batch, kv_head, key, value_dim]``.
        mask: Additive.
        scaling: Factor of the scores; ``head_dim ** -0.5`` when None.
        softcap: Scores become ``softcap * tanh(scores / softcap)`` before the mask.
        sinks: A logit per row that takes part in the softmax and has no value.
    """
    batch, heads, length, dim = keys.shape
    format = keys.format
    factor = format.unit * (dim**-0.5 if scaling is None else scaling)
    key_scales = keys.scales.transpose(2, 3) * factor  # [batch, kv_head, 1, key]
    value_scales = values.scales.transpose(2, 3)
    value_scales = value_scales if format.unit == 1.0 else value_scales * format.unit
    queries = query.float()
    output = query.new_empty(*query.shape[:3], values.shape[3])
    per_slot = heads * length * max(dim, values.shape[3])
    slots = max(1, BLOCK // max(per_slot, 1))
    width = heads if per_slot <= BLOCK else max(1, heads * BLOCK // per_slot)
    for slot in range(0, batch, slots):
        for head in range(0, heads, width):
            part = (slice(slot, slot + slots), slice(head, head + width))
            seen = mask[part] if mask.shape[1] > 1 else mask[part[0]]
            scores = queries[part] @ format.numbers(keys.codes[part]).transpose(2, 3)
            scores *= key_scales[part]
            weights = attention_weights(scores, seen, softcap=softcap, sinks=None if sinks is None else sinks[part])
            output[part] = (weights * value_scales[part]) @ format.numbers(values.codes[part])
    return output
