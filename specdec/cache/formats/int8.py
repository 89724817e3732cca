"""Integers of eight bits."""

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from specdec.cache.formats.base import Format


class EightBitIntegers(Format):
    """Integers from -127 to 127: an error of at most 1/254 of the largest number in the vector."""

    name, dtype, largest = "int8", torch.int8, 127.0

    def codes(self, scaled: Float[Tensor, "*shape dim"]) -> Int8[Tensor, "*shape dim"]:
        """See ``Format.codes``. Halves are rounded to even."""
        return scaled.round_().to(torch.int8)

    def numbers(self, codes: Int8[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        return codes.float()
