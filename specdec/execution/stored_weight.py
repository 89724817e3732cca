"""A weight that a product reads in a layout of its own: oneDNN's blocks, or 16 bits for FBGEMM."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from specdec.opaque import opaque


class StoredWeight(ABC):
    """A linear layer's weight ``[out, in]`` that knows how to multiply.

    It never changes, so copies of a module share it. ``dtype`` is that of inputs and outputs, ``bytes`` the memory that
    the numbers take, ``parts`` the weights whose outputs stand side by side in this one.
    """

    dtype: torch.dtype
    bytes: int
    parts: "tuple[StoredWeight, ...]" = ()

    def __call__(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product, as ``torch.nn.functional.linear`` does, for inputs of the weight's dtype, at least one.

        It is one operation of a program that is noted.
        """
        return opaque(self.multiply, inputs, bias)

    @abstractmethod
    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """See ``__call__``, which programs leave out."""

    def __deepcopy__(self, memo: object) -> "StoredWeight":
        return self
