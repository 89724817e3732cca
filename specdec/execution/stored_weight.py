"""What a weight is that a product reads in a layout of its own: oneDNN's blocks, or 16 bits for FBGEMM."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import Tensor

from specdec.scoped import scoped


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
        """Returns what ``torch.nn.functional.linear`` does, for inputs of the weight's dtype; there must be some."""
        note = _note.get()
        return self.multiply(inputs, bias) if note is None else note(self, inputs, bias)

    @abstractmethod
    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """See ``__call__``, which a capture watches."""

    def __deepcopy__(self, memo: object) -> "StoredWeight":
        return self


Note = Callable[[StoredWeight, Tensor, Tensor | None], Tensor]

# One per thread: others may run other models meanwhile.
_note: ContextVar[Note | None] = ContextVar("note_products", default=None)


def noted_products(note: Note) -> AbstractContextManager[Note | None]:
    """During the ``with`` block, let ``note`` compute the products of all stored weights, each as one operation."""
    return scoped(_note, note)
