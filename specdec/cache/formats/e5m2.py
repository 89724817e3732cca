"""Floats of eight bits, two of them for the mantissa."""

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from specdec.cache.formats.base import Format


class WideEightBitFloats(Format):
    """``float8_e5m2``: a sign, five bits of exponent and two of mantissa.

    The error is at most 1/9 of the number itself, or 1/7,516,192,768 of the largest number in the vector if that is
    more. So it is coarser than ``fp8``, and right for vectors with outliers.
    """

    name, dtype, largest = "fp8_e5m2", torch.float8_e5m2, 57344.0

    def codes(self, scaled: Float[Tensor, "*shape dim"]) -> Int8[Tensor, "*shape dim"]:
        """See ``Format.codes``. Bytes, because not every torch can index a tensor of this dtype."""
        return scaled.to(torch.float8_e5m2).view(torch.int8)

    def numbers(self, codes: Int8[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        """See ``Format.numbers``: the byte is the upper half of a float16."""
        return codes.to(torch.int16).bitwise_left_shift_(8).view(torch.float16).float()
