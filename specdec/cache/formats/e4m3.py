"""Floats of eight bits, three of them for the mantissa."""

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from specdec.cache.formats.base import Format


class EightBitFloats(Format):
    """``float8_e4m3fn``: a sign, four bits of exponent and three of mantissa.

    The error is at most 1/16 of the number itself; for numbers below 1/28,672 of the largest number in the vector, at
    most 1/458,752 of that one.
    """

    name, dtype, largest = "fp8", torch.float8_e4m3fn, 448.0
    unit = 256.0

    def codes(self, scaled: Float[Tensor, "*shape dim"]) -> Int8[Tensor, "*shape dim"]:
        """See ``Format.codes``. Bytes, because not every torch can index a tensor of this dtype."""
        return scaled.to(torch.float8_e4m3fn).view(torch.int8)

    def numbers(self, codes: Int8[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        """See ``Format.numbers``.

        Moved up by seven bits, the byte is a float16: its exponents count from 15 in place of 7, hence the unit of 256.
        Torch's own conversion takes 13 times as long on a CPU (0.72 against 0.055 ms for 262,144 numbers). This one
        does not know the code of NaN, which has a factor that is NaN anyway.
        """
        # The sign is also where it was extended to: in the bit of the exponent that stays free.
        halves = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        return halves.view(torch.float16).float()
