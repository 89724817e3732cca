"""Finds out what a model stores in a cache: the model runs once with a cache that only looks."""

import torch
from torch import Tensor

from specdec.cache.base import LayerShape, OwnLayout
from specdec.cache.states import StateView


class ShapeProbe(OwnLayout):
    """Passes keys and values through and notes their shapes.

    Args:
        num_layers: The number of the model's layers.
        device: The model's main device; layers that run there have no device of their own in their shape.

    Attributes:
        shapes: One shape per layer that stores keys and values. (A layer may store none, or use another layer's.)
        indexers: One shape per layer that selects the keys it sees by other keys (sparse attention).
        states: What recurrent layers have stored.
    """

    def __init__(self, num_layers: int, device: torch.device | None = None):
        super().__init__(num_layers)
        self._device = device
        self.shapes: dict[int, LayerShape] = {}
        self.indexers: dict[int, LayerShape] = {}
        self.states = view = StateView(None)
        # Recurrent layers find nothing here that came before.
        self.get_conv_state, self.get_recurrent_state = view.get_conv_state, view.get_recurrent_state
        self.update_conv_state, self.update_recurrent_state = view.update_conv_state, view.update_recurrent_state
        self.get_linear_cache, self.set_linear_cache = view.get_linear_cache, view.set_linear_cache

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object):
        self.shapes[layer_idx] = LayerShape(
            key_states.shape[1],
            key_states.shape[3],
            value_states.shape[1],
            value_states.shape[3],
            key_states.dtype,
            self._elsewhere(key_states),
        )
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        self.indexers[layer_idx] = LayerShape(
            1, indexer_key_states.shape[2], 0, 0, indexer_key_states.dtype, self._elsewhere(indexer_key_states)
        )
        return indexer_key_states

    def _elsewhere(self, tensor: Tensor) -> torch.device | None:
        """Returns a tensor's device if it is not the model's main device."""
        return tensor.device if self._device is not None and tensor.device != self._device else None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0
