"""A weight that a product reads in a layout of its own: oneDNN's blocks, or 16 bits for FBGEMM."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from specdec.execution.program import opaque


class StoredWeight(ABC):
    """A linear layer's weight ``[out, in]`` that knows how to multiply.

    It never changes, so copies of a module share it.

    Attributes:
        dtype: The dtype of inputs and outputs.
        bytes: The memory that the numbers take, in bytes.
    """

    dtype: torch.dtype
    bytes: int

    def __call__(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product, as ``torch.nn.functional.linear`` does, for inputs of the weight's dtype, at least one.

        It is one operation of a program that is noted.
        """
        return opaque(self.multiply, inputs, bias)

    @abstractmethod
    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """See ``__call__``, which programs leave out."""

    def __deepcopy__(self, memo: object) -> "StoredWeight":
        return self


def is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor's numbers lie at its address: a subclass may have none of its own."""
    return type(tensor) is Tensor or type(tensor) is nn.Parameter
