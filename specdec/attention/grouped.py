"""Grouped-query attention that reads each key and value head once.

Transformers' SDPA path copies K and V to the number of query heads whenever there is a mask and more than one
query. Here the query heads that share a key head are laid along the query axis: the same products, no copy. Logit
softcapping (Gemma-2) and attention sinks (gpt-oss), which SDPA refuses, run as plain matrix products.

Quantized keys and values are read on a CPU without ever having all of them decoded. A key's factor is the same for all
of its numbers, so it is applied to the score in place of the key; a value's factor, to the weight in place of the
value. What is left is to convert codes to float32, for a block of heads at a time, which stays in the processor's
cache: from memory come bytes.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specdec.attention.call import AttentionBackend, AttentionCall, View, answered_by
from specdec.attention.facts import Facts
from specdec.attention.masks import dense_masks
from specdec.cache.formats import QuantizedTensor
from specdec.cache.storage import Cache
from specdec.forward import ForwardBatch

BLOCK = 2**18
"""Numbers of a block of quantized keys: 1 MB of them in float32."""
MOST_ROWS = 128
"""Rows of queries per key head up to which scores are kept for all quantized keys. Prefill has more, and decodes all
keys, whose number is then small against that of the scores."""


@dataclass(eq=False)
class GroupedView(View):
    """Dense masks, and the same with their rows repeated for the query heads that share a key head.

    Attributes:
        repeated: The repeated masks, by reach and heads of a group; made when a layer first needs them.
    """

    repeated: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def rows(self, reach: int, groups: int) -> Float[Tensor, "batch 1 rows key"]:
        """Return the mask of a reach, head by head within a group."""
        if groups == 1:
            return self.masks[reach]
        mask = self.masks[reach]
        if mask.shape[2] == 1:
            return mask.expand(-1, -1, groups, -1)
        if (reach, groups) not in self.repeated:
            self.repeated[reach, groups] = mask.repeat(1, 1, groups, 1)
        return self.repeated[reach, groups]


class GroupedAttention(AttentionBackend):
    """Dense masks and SDPA, or matrix products for what it refuses. Consecutive slots are attended to together."""

    def prepare(self, batch: ForwardBatch, cache: Cache, facts: Facts) -> GroupedView:
        """Return one dense mask per reach."""
        return GroupedView(cache, dense_masks(batch, cache.get_mask_sizes(batch.nodes, 0)[0], facts))

    def attend(self, call: AttentionCall, view: GroupedView) -> Tensor:
        """See ``AttentionBackend.attend``. Runs of consecutive slots are read where they lie, without a copy."""
        query, key, _, layer, reach, scaling, softcap, sinks = call
        cache = view.cache
        mask = view.rows(reach, query.shape[1] // key.shape[1])
        options = {"scaling": scaling, "softcap": softcap, "sinks": sinks}
        if len(cache.segments) == 1:
            return attend(query, *cache.read(layer), mask, **options)
        parts = [
            attend(query[segment.rows], *cache.read_segment(layer, segment), mask[segment.rows], **options)
            for segment in cache.segments
        ]
        return torch.cat(parts)


class EagerAttention(AttentionBackend):
    """The model's own attention, as transformers wrote it: what every other backend is compared with."""

    passes_cache = True
    function = "eager"

    def check(self, model: Any) -> str | None:
        """Return None: every model has an attention of its own."""
        return None


class DenseAttention(AttentionBackend):
    """The same products over the keys and masks that the model passes, for models that change them on the way."""

    passes_cache = True

    def answering(self) -> AbstractContextManager[object]:
        """See ``AttentionBackend.answering``."""
        return answered_by(_answer)


def _answer(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *options: Any) -> Tensor:
    """Return attention's output; the mask may differ from head to head, for models that add a bias."""
    groups, kv_heads, queries = query.shape[1] // key.shape[1], key.shape[1], query.shape[2]
    if mask.shape[1] > 1:
        mask = mask[:, :, :queries].reshape(mask.shape[0], kv_heads, groups * queries, mask.shape[3])
    else:
        mask = mask.repeat(1, 1, groups, 1)
    scaling, softcap, sinks = options
    return attend(query, key, value, mask, scaling=scaling, softcap=softcap, sinks=sinks)


def attend(
    query: Float[Tensor, "batch head query head_dim"], key: Float[Tensor, "batch kv_head key head_dim"],
    value: Float[Tensor, "batch kv_head key value_dim"], mask: Float[Tensor, "batch mask_head rows key"], *,
    scaling: float | None = None, softcap: float | None = None, sinks: Float[Tensor, " head"] | None = None,
) -> Float[Tensor, "batch query head value_dim"]:  # fmt: skip
    """Return attention's output over all keys that queries may see.

    Keys and values are not repeated for the query heads that share them; the rows of the additive mask are. For the
    other arguments see ``AttentionCall``.
    """
    batch, heads, queries, head_dim = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(batch, key.shape[1], groups * queries, head_dim)
    mask = mask.to(query.dtype)  # some models compute attention in float32 whatever their dtype
    if sinks is not None:
        sinks = sinks.float().view(1, key.shape[1], groups, 1, 1).expand(batch, -1, -1, queries, 1)
        sinks = sinks.reshape(batch, key.shape[1], groups * queries, 1)
    if isinstance(key, QuantizedTensor) and isinstance(value, QuantizedTensor):
        if query.device.type == "cpu" and query.shape[2] <= MOST_ROWS and query.dtype is not torch.float64:
            return _by_node(attend_codes(query, key, value, mask, scaling=scaling, softcap=softcap, sinks=sinks), heads)
        key, value = key.decoded(), value.decoded()
    if softcap is None and sinks is None:
        output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    else:
        scores = query @ key.transpose(2, 3) * (head_dim**-0.5 if scaling is None else scaling)
        output = attention_weights(scores, mask, softcap=softcap, sinks=sinks).to(value.dtype) @ value
    return _by_node(output, heads)


def _by_node(output: Float[Tensor, "batch kv_head rows value_dim"], heads: int) -> Tensor:
    """Returns ``[batch, query, head, value_dim]``, as transformers has it."""
    return output.reshape(output.shape[0], heads, -1, output.shape[3]).transpose(1, 2).contiguous()


def attend_codes(
    query: Float[Tensor, "batch kv_head rows head_dim"], keys: QuantizedTensor, values: QuantizedTensor,
    mask: Float[Tensor, "batch mask_head rows key"], *, scaling: float | None, softcap: float | None,
    sinks: Float[Tensor, "batch kv_head rows 1"] | None,
) -> Float[Tensor, "batch kv_head rows value_dim"]:  # fmt: skip
    """Return attention's output in the queries' dtype; products and softmax are float32's.

    Keys are ``[batch, kv_head, key, head_dim]``, values ``[batch, kv_head, key, value_dim]``; see ``attend``.
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


def attention_weights(
    scores: Float[Tensor, "batch kv_head rows key"],
    mask: Float[Tensor, "batch mask_head rows key"],
    *,
    softcap: float | None,
    sinks: Float[Tensor, "batch kv_head rows 1"] | None,
) -> Float[Tensor, "batch kv_head rows key"]:
    """Return the weights of the values, in float32, from scaled products of queries and keys; see ``attend``."""
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = (scores + mask).float()
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
