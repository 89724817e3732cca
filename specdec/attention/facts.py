"""What is known about a model before it decodes: plain values, found once by its configuration and a trial forward."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.cache.base import LayerShape


class Reach(NamedTuple):
    """How far back the queries of a layer see: a window, or a chunk of the row; everything if both are None."""

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, eq=False)
class Facts:
    """What running a model over a cache depends on.

    Attributes:
        model_type: Its type in transformers.
        reaches: How far back the layers of every type see.
        layers: One shape for every layer that stores keys and values.
        indexers: One shape for every layer that selects keys by other keys.
        vocab_size: The width of the logits.
        dtype: The model's dtype.
        device: The device on which the model takes tokens and returns logits.
        keeps_logits: Whether the model can be asked for the logits of the last nodes only.
        experts: The implementation of a mixture's experts.
    """

    model_type: str
    reaches: Mapping[str, Reach]
    layers: Mapping[int, LayerShape]
    indexers: Mapping[int, LayerShape]
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    keeps_logits: bool
    experts: str

    @cached_property
    def distinct_reaches(self) -> tuple[Reach, ...]:
        """The different reaches: a forward has one mask for each."""
        return tuple(dict.fromkeys(self.reaches.values()))

    def mask_argument(self, masks: list[Tensor]) -> Tensor | Mapping[str, Tensor]:
        """Return one mask per distinct reach in the form that the model takes: a dict where layers differ."""
        if len(self.reaches) == 1:
            return masks[0]
        by_reach = dict(zip(self.distinct_reaches, masks, strict=True))
        return {layer_type: by_reach[reach] for layer_type, reach in self.reaches.items()}
