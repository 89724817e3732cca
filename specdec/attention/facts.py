"""What is known about a model before it decodes: plain values, found once by its configuration and a trial forward."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache as TransformersCache

from specdec.cache.layout import LayerShape
from specdec.cache.transformers_cache import cache_argument
from specdec.recurrent.mixer import Mixer


class Reach(NamedTuple):
    """How far back the queries of a layer see: a window, or a chunk of the row; everything if both are None."""

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, eq=False)
class Facts:
    """What running a model over a cache depends on.

    Attributes:
        model_type: Its type in transformers.
        reaches: How far back the layers of every type see; None for a type without attention.
        layers: One shape for every layer that stores keys and values.
        indexers: One shape for every layer that selects keys by other keys.
        vocab_size: The width of the logits.
        dtype: The model's dtype.
        device: The device on which the model takes tokens and returns logits.
        keeps_logits: Whether the model can be asked for the logits of the last nodes only.
        experts: The implementation of a mixture's experts.
        mixers: Its recurrent layers.
        arguments: The names of its forward's arguments.
        cache_class: The class that it wants a cache to be of.
    """

    model_type: str
    reaches: Mapping[str, Reach | None]
    layers: Mapping[int, LayerShape]
    indexers: Mapping[int, LayerShape]
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    keeps_logits: bool
    experts: str
    mixers: tuple[Mixer, ...] = ()
    arguments: frozenset[str] = frozenset({"attention_mask", "position_ids", "past_key_values"})
    cache_class: type = TransformersCache

    @cached_property
    def distinct_reaches(self) -> tuple[Reach, ...]:
        """The different reaches: a forward has one mask for each."""
        return tuple(dict.fromkeys(reach for reach in self.reaches.values() if reach is not None))

    def mask_argument(self, masks: list[Tensor]) -> Tensor | Mapping[str, Tensor | None] | None:
        """Return one mask per distinct reach in the form that the model takes: a dict where layers differ."""
        masked = [reach for reach in self.reaches.values() if reach is not None]
        if len(masked) < 2:
            return masks[0] if masked else None
        by_reach = dict(zip(self.distinct_reaches, masks, strict=True))
        return {kind: None if reach is None else by_reach[reach] for kind, reach in self.reaches.items()}

    @property
    def cache_argument(self) -> str:
        """The name of the cache among the arguments."""
        return cache_argument(self.arguments)
