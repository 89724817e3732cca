"""Grouped-query attention that reads each key and value head once.

Transformers' SDPA path copies K and V to the number of query heads whenever there is a mask and more than one
query. Here the query heads that share a key head are laid along the query axis: the same products, no copy. Logit
softcapping (Gemma-2) and attention sinks (gpt-oss), which SDPA refuses, run as plain matrix products.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from specdec.attention.base import AttentionBackend, AttentionState, refuses_attention_functions
from specdec.attention.codes import attend_codes, reads_codes
from specdec.attention.masks import dense_masks
from specdec.attention.softmax import attention_weights
from specdec.cache.base import Cache
from specdec.cache.quantized_tensor import QuantizedTensor
from specdec.forward import ForwardBatch
from specdec.machine import bfloat16_products_beat_sdpa, bfloat16_queries_in_float32
from specdec.scoped import scoped

if TYPE_CHECKING:
    from specdec.target.plan import ModelPlan

NAME = "specdec_grouped"
IGNORED = ("position_ids", "cache_position")  # tensors that say what the mask says

# One per thread: others may run other models meanwhile.
_notes: ContextVar[list[int] | None] = ContextVar("groups", default=None)


class GroupedAttention(AttentionBackend):
    """This file's function with a dense mask, whose rows are repeated for every query head that shares a key head."""

    name = NAME
    replayable = True

    def prepare(self, batch: ForwardBatch, cache: Cache, plan: "ModelPlan") -> AttentionState:
        """Returns one dense mask per reach."""
        length = cache.get_mask_sizes(batch.nodes, 0)[0]
        return AttentionState(dense_masks(batch, length, plan, groups=plan.groups))

    def attend(
        self,
        state: AttentionState,
        cache: Cache,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layer: int,
        mask: int,
        scaling: float | None,
        softcap: float | None,
    ) -> Tensor:
        """See ``AttentionBackend.attend``. Consecutive slots are attended to together, so that nothing is copied."""
        cache.write(layer, key, value)
        rows = state.masks[mask]
        if len(cache.segments) == 1:
            keys, values = cache.read(layer)
            return attend(query, keys, values, rows, scaling=scaling, softcap=softcap, sinks=sinks)
        outputs = []
        for segment in cache.segments:
            keys, values = cache.read_segment(layer, segment)
            part, seen = query[segment.rows], rows[segment.rows]
            outputs.append(attend(part, keys, values, seen, scaling=scaling, softcap=softcap, sinks=sinks))
        return torch.cat(outputs)

    def check(self, model: Any) -> str | None:
        """See ``AttentionBackend.check``."""
        return refuses_attention_functions(model)


@contextmanager
def noted_groups() -> Iterator[list[int]]:
    """Note, during the ``with`` block, how many query heads share a key head in each call: one number per layer.

    Only a call shows it: a configuration may leave the number out, or the model may expand its keys first. The calls
    are also checked for arguments that this function does not know.
    """
    groups: list[int] = []
    with scoped(_notes, groups):
        yield groups


def note_groups(query: Tensor, key: Tensor) -> bool:
    """Note a call of an attention function for ``noted_groups``; returns whether somebody wants to know."""
    noted = _notes.get()
    if noted is not None:
        noted.append(query.shape[1] // key.shape[1])
    return noted is not None


def grouped_attention(
    module: nn.Module,
    query: Float[Tensor, "batch head query head_dim"],
    key: Float[Tensor, "batch kv_head key head_dim"],
    value: Float[Tensor, "batch kv_head key value_dim"],
    attention_mask: Float[Tensor, "batch mask_head rows key"],
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
        attention_mask: Additive. Either one for all heads (``mask_head`` is 1; its rows may be repeated for the heads
            of a group, once for all layers), or one per query head, for models that add a bias.
        scaling: Factor of the scores; ``head_dim ** -0.5`` when None.
        softcap: Scores become ``softcap * tanh(scores / softcap)`` before the mask.
        s_aux: Attention sinks, one logit per head that takes part in the softmax and has no value.
        **kwargs: Position ids and the like, which the mask contains already.

    Raises:
        TypeError: A tensor among ``kwargs`` would be ignored. (Checked in ``noted_groups`` only.)
    """
    if note_groups(query, key):
        check_arguments(kwargs)
    return attend(query, key, value, attention_mask, scaling=scaling, softcap=softcap, sinks=s_aux), None


def attend(
    query: Float[Tensor, "batch head query head_dim"],
    key: Float[Tensor, "batch kv_head key head_dim"],
    value: Float[Tensor, "batch kv_head key value_dim"],
    mask: Float[Tensor, "batch mask_head rows key"],
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " head"] | None = None,
) -> Float[Tensor, "batch query head value_dim"]:
    """Returns what ``grouped_attention`` does, without the conventions of transformers."""
    batch, heads, queries, head_dim = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(batch, key.shape[1], groups * queries, head_dim)
    # Some models compute attention in float32 whatever their dtype.
    mask = _group_mask(mask, key.shape[1], groups, queries).to(query.dtype)
    if sinks is not None:
        sinks = sinks.float().view(1, key.shape[1], groups, 1, 1).expand(batch, -1, -1, queries, 1)
        sinks = sinks.reshape(batch, key.shape[1], groups * queries, 1)
    if isinstance(key, QuantizedTensor) and isinstance(value, QuantizedTensor):
        if reads_codes(query):
            output = attend_codes(query, key, value, mask, scaling=scaling, softcap=softcap, sinks=sinks)
            return _by_node(output, heads)
        key, value = key.decoded(), value.decoded()
    if softcap is None and sinks is None and not _products_are_faster(query, key):
        output = _sdpa(query, key, value, mask, scaling)
    else:
        scores = query @ key.transpose(2, 3) * (head_dim**-0.5 if scaling is None else scaling)
        output = attention_weights(scores, mask, softcap=softcap, sinks=sinks).to(value.dtype) @ value
    return _by_node(output, heads)


def _by_node(output: Float[Tensor, "batch kv_head rows value_dim"], heads: int) -> Tensor:
    """Returns ``[batch, query, head, value_dim]``, as transformers has it."""
    return output.reshape(output.shape[0], heads, -1, output.shape[3]).transpose(1, 2).contiguous()


def check_arguments(kwargs: Mapping[str, object]) -> None:
    """Refuse tensors that a model gives its attention function and that this one does not know.

    Raises:
        TypeError: Names them.
    """
    unknown = [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in IGNORED]
    if unknown:
        raise TypeError(f"the attention function is given {', '.join(unknown)}, which only the model's own knows")


def _group_mask(
    mask: Float[Tensor, "batch mask_head rows key"], kv_heads: int, groups: int, queries: int
) -> Float[Tensor, "batch _ grouped key"]:
    """Returns the mask with its rows in the order of the queries: head by head within a group."""
    if mask.shape[1] > 1:
        return mask[:, :, :queries].reshape(mask.shape[0], kv_heads, groups * queries, mask.shape[3])
    if mask.shape[2] != groups * queries:  # this layer has groups of another size than most layers
        mask = mask[:, :, :queries].repeat(1, 1, groups, 1)
    return mask


def _sdpa(
    query: Float[Tensor, "batch kv_head rows head_dim"],
    key: Float[Tensor, "batch kv_head key head_dim"],
    value: Float[Tensor, "batch kv_head key value_dim"],
    mask: Float[Tensor, "batch mask_head rows key"],
    scaling: float | None,
) -> Float[Tensor, "batch kv_head rows value_dim"]:
    """Returns SDPA's result, avoiding a weakness of its bfloat16 kernel on CPUs.

    That kernel is slowest for a single row of queries: slower than for two, and up to five times slower than in
    float32, even if K and V must be copied for that (torch 2.13, AVX512-BF16). So a single row runs in float32 as long
    as the copies fit into the processor's caches, and as two equal rows beyond that.
    """
    sdpa = nn.functional.scaled_dot_product_attention
    single = query.shape[2] == 1 and query.dtype is torch.bfloat16 and query.device.type == "cpu"
    if not single or not bfloat16_queries_in_float32():
        return sdpa(query, key, value, attn_mask=mask, scale=scaling)
    if key.numel() <= _MOST_COPIED:
        output = sdpa(query.float(), key.float(), value.float(), attn_mask=mask.float(), scale=scaling)
        return output.to(query.dtype)
    twice = query.expand(-1, -1, 2, -1)
    return sdpa(twice, key, value, attn_mask=mask.expand(-1, -1, 2, -1), scale=scaling)[:, :, :1]


_MOST_COPIED = 2**21  # numbers in K, over heads and slots: 8 MB in float32; V takes as much again


def _products_are_faster(
    query: Float[Tensor, "batch kv_head rows head_dim"], key: Float[Tensor, "batch kv_head key head_dim"]
) -> bool:
    """Returns whether two matrix products beat SDPA: on a CPU in bfloat16, for the queries of a large tree.

    SDPA's kernel converts blocks of keys and scores. From about 32 rows per key head on, oneDNN's products take as
    little as half of its time (torch 2.13, AVX512-BF16). Prefill has more rows, whose scores would need much memory.
    """
    if query.device.type != "cpu" or query.dtype is not torch.bfloat16 or not 32 <= query.shape[2] <= 128:
        return False
    return bfloat16_products_beat_sdpa() and key.shape[0] * key.shape[1] * key.shape[2] >= 1024


AttentionInterface.register(NAME, grouped_attention)
# The model is given complete masks; this entry only makes transformers pass them on.
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
