"""What a head borrows from the target while it is trained: embeddings and output layer, frozen, in their own dtype."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class Borrowed(nn.Module):
    """A module of the target that a head uses. Its parameters are not the head's: nothing trains, moves or saves them.

    Args:
        module: The target's.
        dtype: The dtype that the head computes in.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        super().__init__()
        self._module = (module,)  # in a tuple, or it would be registered
        self._dtype = dtype

    @property
    def weight(self) -> Tensor:
        found: Any = self._module[0].weight
        return found

    def forward(self, given: Tensor) -> Tensor:
        """Returns the module's output in the head's dtype."""
        if given.is_floating_point():
            given = given.to(self.weight.dtype)
        return self._module[0](given).to(self._dtype)


def embeddings_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Borrowed:
    """Returns a target's input embeddings."""
    found: Any = model.get_input_embeddings()
    return Borrowed(found, dtype)


def output_layer_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Borrowed:
    """Returns a target's output layer."""
    found: Any = model.get_output_embeddings()
    return Borrowed(found, dtype)
