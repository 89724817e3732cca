"""A cache that stores nothing, and notes what a model would store."""

from typing import Any

import torch
from torch import Tensor

from specdec.cache.layout import LayerShape
from specdec.cache.states import StateView
from specdec.cache.transformers_cache import OwnLayout


class ShapeProbe(OwnLayout):
    """Passes keys and values through and notes their shapes.

    Attributes:
        shapes: One shape per layer that stores keys and values. (A layer may store none, or use another layer's.)
        indexers: One shape per layer that selects the keys it sees by other keys (sparse attention).
        states: The states of recurrent layers, which find nothing here that came before.
    """

    def __init__(self, num_layers: int, device: torch.device):
        super().__init__(num_layers)
        self._device = device  # layers that run there have no device of their own in their shape
        self.shapes, self.indexers = dict[int, LayerShape](), dict[int, LayerShape]()
        self.states = view = StateView(None)
        self.get_conv_state, self.get_recurrent_state = view.get_conv_state, view.get_recurrent_state
        self.update_conv_state, self.update_recurrent_state = view.update_conv_state, view.update_recurrent_state
        self.get_linear_cache, self.set_linear_cache = view.get_linear_cache, view.set_linear_cache

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object):
        sizes: Any = *key_states.shape[1::2], *value_states.shape[1::2], key_states.dtype
        self.shapes[layer_idx] = LayerShape(*sizes, device=self._elsewhere(key_states))
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        width, dtype = indexer_key_states.shape[2], indexer_key_states.dtype
        self.indexers[layer_idx] = LayerShape(1, width, 0, 0, dtype, self._elsewhere(indexer_key_states))
        return indexer_key_states

    def _elsewhere(self, tensor: Tensor) -> torch.device | None:
        return None if tensor.device == self._device else tensor.device

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0
