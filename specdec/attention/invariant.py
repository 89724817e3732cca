"""Attention whose result for a token depends on nothing but the tokens that it sees, bit for bit.

The usual kernels add up the same numbers in another order when a batch has other sizes, and so round differently. Here
everything that is added up has one order and one shape:

* A query's keys are taken in the order of their positions, as plain decoding finds them (``logical_order``).
* Positions are cut into blocks of one size, always counted from position 0. The block is multiplied with all queries
  by one matrix product of a fixed shape. A block that holds fewer keys is filled up with others, which are masked.
* Blocks are combined one after another, from position 0 on, with a running maximum (the online softmax of
  FlashAttention). A block of which a query sees nothing leaves its result as it is, to the last bit.

All of this is computed in float32, or float64 for models in float64.
"""

import torch
from torch import Tensor

from specdec.attention.call import AttentionCall
from specdec.attention.logical_order import Sight
from specdec.cache.storage import Cache

_LANES = 4
"""Equal columns of a running maximum. Torch's vectorized ``exp`` computes the last numbers of a tensor by other code if
they do not fill a vector; with these columns, 16 queries always do."""


class SingleTokens:
    """The attention of single tokens of different sequences, each of which goes through the model as a row of its own.

    Only the first ``written`` rows are written to the cache. The others repeat the last one, to fill the shape up.
    """

    def __init__(self, cache: Cache, written: int, sight: Sight):
        self._cache, self._written, self._sight = cache, written, sight

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's keys and values."""
        self._cache.write(layer, keys[: self._written], values[: self._written])

    def attend(self, call: AttentionCall) -> Tensor:
        """Return attention's output, ``[query, 1, head, value_dim]``."""
        query, _, value, layer, reach, scaling, softcap, sinks = call
        stored = self._cache.stored(layer)
        wide = torch.promote_types(query.dtype, torch.float32)
        factor = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
        rows = _by_key_head(query.to(wide) * factor, stored.keys.shape[1])
        kv_heads, queries, groups, _ = rows.shape
        sinks = None if sinks is None else sinks.to(wide).view(kv_heads, 1, groups, 1)
        running = _OnlineSoftmax(rows, value.shape[-1], sinks)
        rows = rows.reshape(kv_heads, queries * groups, -1)
        for piece, needed in enumerate(self._sight.needed[reach]):
            if not needed:
                continue
            keys = self._sight.block(piece, self._cache, stored.keys, stored.key_scales, wide)
            scores = torch.bmm(rows, keys.transpose(1, 2)).view(kv_heads, queries, groups, -1)
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            scores = scores.masked_fill(self._sight.hidden(reach, piece), -torch.inf)
            values = self._sight.block(piece, self._cache, stored.values, stored.value_scales, wide)
            running.add(scores, values, self._sight.outside(piece))
        output = running.result().transpose(0, 1).reshape(queries, 1, kv_heads * groups, -1)
        return output.to(query.dtype)


class _OnlineSoftmax:
    """The online softmax of some queries, ``[kv_head, query, group, dim]``, over the blocks that were added so far."""

    def __init__(self, rows: Tensor, value_dim: int, sinks: Tensor | None):
        shape = rows.shape[:3]
        self._largest = rows.new_full((*shape, _LANES), torch.finfo(rows.dtype).min)
        self._total = rows.new_zeros((*shape, 1))
        if sinks is not None:
            self._largest = torch.maximum(self._largest, sinks)
            self._total = torch.ones_like(self._total)
        self._output = rows.new_zeros((*shape, value_dim))

    def add(self, scores: Tensor, values: Tensor, outside: Tensor) -> None:
        """Take in a block: scores ``[kv_head, query, group, key]`` and values ``[kv_head, key, value_dim]``.

        Scores are -inf for hidden keys; ``outside`` marks queries of other sequences, ``[query, 1, 1]``.
        """
        kv_heads, queries, groups, _ = scores.shape
        largest = torch.maximum(self._largest, scores.amax(-1, keepdim=True))
        before = torch.exp(self._largest - largest)[..., :1]
        weights = torch.exp(scores - largest[..., :1])
        part = torch.bmm(weights.view(kv_heads, queries * groups, -1), values).view_as(self._output)
        # Zero times the NaN of another sequence is NaN.
        part = part.masked_fill(outside, 0.0)
        self._output = self._output * before + part
        self._total = self._total * before + weights.sum(-1, keepdim=True)
        self._largest = largest

    def result(self) -> Tensor:
        """Return the weighted mean of the values, ``[kv_head, query, group, value_dim]``."""
        return self._output / self._total


def _by_key_head(query: Tensor, kv_heads: int) -> Tensor:
    """Return queries of single tokens, ``[query, head, 1, dim]``, as ``[kv_head, query, group, dim]``."""
    queries, heads, _, dim = query.shape
    return query.view(queries, kv_heads, heads // kv_heads, dim).transpose(0, 1).contiguous()
