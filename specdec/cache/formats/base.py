"""Number formats of a quantized KV cache: one byte per number, and one factor per position and head.

The factor scales the largest number of a head's vector to the largest code. So a vector's error depends on that vector
alone: not on its neighbours, nor on the order in which a sequence was fed. Everything is computed in float32.
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float, Int8
from torch import Tensor

SMALLEST_SCALE = 2.0**-120
"""Factors are at least this large, so that a vector of zeros has one to be divided by. A vector whose largest number is
below ``448 * SMALLEST_SCALE`` (3e-34) is stored more coarsely than the formats' bounds say, and no worse than
``SMALLEST_SCALE``."""


class Format(ABC):
    """A way of storing a number in one byte.

    A number is its code's value times the factor of its vector. NaN and infinite numbers make the factor NaN or
    infinite, and with it every number of the vector: what went wrong stays visible.

    Attributes:
        name: What ``kv_cache=`` calls it.
        dtype: The dtype in which a kernel reads the codes.
        largest: The largest code's value.
        unit: What the results of ``numbers`` have to be multiplied with.
    """

    name: str
    dtype: torch.dtype
    largest: float
    unit: float = 1.0

    def encode(
        self, given: Float[Tensor, "*shape dim"]
    ) -> tuple[Int8[Tensor, "*shape dim"], Float[Tensor, "*shape 1"]]:
        """Returns codes, as bytes, and one factor per vector in float32."""
        given = given.float()
        scales = given.abs().amax(-1, keepdim=True).div_(self.largest).clamp_(min=SMALLEST_SCALE)
        return self.codes(given / scales), scales

    def decode(
        self, codes: Int8[Tensor, "*shape dim"], scales: Float[Tensor, "*shape 1"], dtype: torch.dtype
    ) -> Float[Tensor, "*shape dim"]:
        """Returns the numbers that codes stand for, rounded once to a dtype."""
        numbers = self.numbers(codes)
        return numbers.mul_(scales if self.unit == 1.0 else scales * self.unit).to(dtype)

    @abstractmethod
    def codes(self, scaled: Float[Tensor, "*shape dim"]) -> Int8[Tensor, "*shape dim"]:
        """Returns the nearest codes of numbers between ``-largest`` and ``largest``. It may write to ``scaled``."""

    @abstractmethod
    def numbers(self, codes: Int8[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        """Returns the codes' values divided by ``unit``, in new memory, in float32."""
