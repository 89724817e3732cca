"""What a model with a quantized KV cache computes, in transformers' own cache: the reference for ours."""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdec.cache.formats import Format, check_format


class RoundedCache(DynamicCache):
    """transformers' growing cache, whose entries are rounded to a format when they are stored, and kept as numbers.

    It shares the format with the engine's cache and nothing else: neither positions, nor commits, nor attention.

    Args:
        model: The model whose layers it is for.
        format: The format.
    """

    def __init__(self, model: PreTrainedModel, format: Format):
        super().__init__(config=model.config)
        self.format = format

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store rounded keys and values; returns all of the layer's."""
        keys, values = (
            self.format.decode(*self.format.encode(each), each.dtype) for each in (key_states, value_states)
        )
        return super().update(keys, values, layer_idx, *args, **kwargs)


def cache_like(model: PreTrainedModel, kv_cache: str | None) -> DynamicCache | None:
    """Returns an empty cache that rounds as the engine's with the same ``kv_cache=``; None if that does not round.

    Raises:
        ValueError: There is no such format.
    """
    format = check_format(kv_cache)
    return None if format is None else RoundedCache(model, format)
