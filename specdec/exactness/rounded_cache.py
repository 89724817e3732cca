"""What a model with a quantized KV cache computes, in transformers' own cache: the reference for ours."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdec.cache.formats import Format, check_format


class RoundedCache(DynamicCache):
    """transformers' growing cache, whose entries are rounded to a format when they are stored, and kept as numbers.

    It shares the format with the engine's cache and nothing else: neither positions, nor commits, nor attention.

    Args:
        model: The model whose layers it is for.
        format: The format.
        shake: How far numbers are moved at random before they are rounded, as a fraction of the largest number in their
            vector. What lies that close to the border of two codes may then get either.
        seed: The seed of that.
    """

    def __init__(self, model: PreTrainedModel, format: Format, *, shake: float = 0.0, seed: int = 0):
        super().__init__(config=model.config)
        self.format, self.shake = format, shake
        self._generator = torch.Generator(model.device).manual_seed(seed)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store rounded keys and values; returns all of the layer's."""
        return super().update(self._rounded(key_states), self._rounded(value_states), layer_idx, *args, **kwargs)

    def _rounded(self, states: Tensor) -> Tensor:
        given = states
        if self.shake:
            noise = torch.rand(states.shape, generator=self._generator, device=states.device).mul_(2).sub_(1)
            given = states.float() + noise * (self.shake * states.float().abs().amax(-1, keepdim=True))
        return self.format.decode(*self.format.encode(given), states.dtype)


def cache_like(
    model: PreTrainedModel, kv_cache: str | None, *, shake: float = 0.0, seed: int = 0
) -> DynamicCache | None:
    """Return an empty cache that rounds as the engine's with the same ``kv_cache=``; None if that does not round.

    Args:
        model: The model.
        kv_cache: Name of the format.
        shake: See ``RoundedCache``.
        seed: See ``RoundedCache``.

    Raises:
        ValueError: There is no such format.
    """
    format = check_format(kv_cache)
    return None if format is None else RoundedCache(model, format, shake=shake, seed=seed)
