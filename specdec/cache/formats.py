"""The number formats of a quantized KV cache: one byte per number, and one factor per position and head.

The factor scales the largest number of a head's vector to the largest code. So a vector's error depends on that vector
alone: not on its neighbours, nor on the order in which a sequence was fed. Everything is computed in float32.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Float, Int8
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

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
        dtype: The dtype in which a kernel reads the codes, whose values ``numbers`` must give.
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

    def codes(self, scaled: Float[Tensor, "*shape dim"]) -> Int8[Tensor, "*shape dim"]:
        """Returns the nearest codes of numbers between ``-largest`` and ``largest``; halves become even integers.

        They are bytes, because not every torch can index a tensor of 8-bit floats. It may write to ``scaled``.
        """
        scaled = scaled if self.dtype.is_floating_point else scaled.round_()
        return scaled.to(self.dtype).view(torch.int8)

    @abstractmethod
    def numbers(self, codes: Int8[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        """Returns the codes' values divided by ``unit``, in new memory, in float32."""


class EightBitIntegers(Format):
    """Integers from -127 to 127: an error of at most 1/254 of the largest number in the vector."""

    name, dtype, largest = "int8", torch.int8, 127.0

    def numbers(self, codes: Int8[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        return codes.float()


class EightBitFloats(Format):
    """``float8_e4m3fn``: a sign, four bits of exponent and three of mantissa.

    The error is at most 1/16 of the number itself; for numbers below 1/28,672 of the largest number in the vector, at
    most 1/458,752 of that one.
    """

    name, dtype, largest, unit = "fp8", torch.float8_e4m3fn, 448.0, 256.0

    def numbers(self, codes: Int8[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        """See ``Format.numbers``.

        Moved up by seven bits, the byte is a float16: its exponents count from 15 in place of 7, hence the unit of 256.
        Torch's own conversion takes 13 times as long on a CPU (0.72 against 0.055 ms for 262,144 numbers). This one
        does not know the code of NaN, which has a factor that is NaN anyway.
        """
        # The sign is also where it was extended to: in the bit of the exponent that stays free.
        halves = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        return halves.view(torch.float16).float()


class WideEightBitFloats(Format):
    """``float8_e5m2``: a sign, five bits of exponent and two of mantissa.

    The error is at most 1/9 of the number itself, or 1/7,516,192,768 of the largest number in the vector if that is
    more. So it is coarser than ``fp8``, and right for vectors with outliers.
    """

    name, dtype, largest = "fp8_e5m2", torch.float8_e5m2, 57344.0

    def numbers(self, codes: Int8[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        """See ``Format.numbers``: the byte is the upper half of a float16."""
        return codes.to(torch.int16).bitwise_left_shift_(8).view(torch.float16).float()


FORMATS: dict[str, Format] = {each.name: each for each in (EightBitIntegers(), EightBitFloats(), WideEightBitFloats())}
"""What ``kv_cache=`` names."""


def check_format(name: object) -> Format | None:
    """Returns the format of that name; None for a cache in the model's own dtype."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"kv_cache={name!r}: give {', '.join(FORMATS)}, or None for the model's own dtype")
    return FORMATS[name]


def check_device(format: Format, device: torch.device) -> None:
    """Refuse a format that a device cannot compute."""
    try:
        codes, scales = format.encode(torch.ones(1, 2, device=device))
        right = bool((format.decode(codes, scales, torch.float32) == 1).all())
        every = torch.arange(-128, 128, device=device).to(torch.int8)
        read = every.view(format.dtype).float()  # as kernels do
        right = right and bool(((format.numbers(every) * format.unit == read) | ~read.isfinite()).all())
    except (RuntimeError, TypeError, NotImplementedError):
        right = False
    if not right:
        others = [name for name in FORMATS if name != format.name]
        raise ValueError(
            f"kv_cache={format.name!r}: {device} cannot convert to it, or its codes' values are not those of "
            f"{format.dtype}; give {others[0]!r} or None"
        )


class QuantizedTensor(Tensor):
    """Looks like a tensor of the model's dtype, and is decoded by the first operation that reads it.

    So any attention function can read a quantized cache. One that knows this class takes ``codes`` and ``scales``, and
    need never have all numbers in memory. It cannot be written to.

    Attributes:
        codes: Bytes, in the shape of the tensor.
        scales: One float32 factor per vector: the same shape, with 1 for the last axis.
        format: How numbers are stored.
    """

    codes: Tensor
    scales: Tensor
    format: Format

    @staticmethod
    def __new__(cls: Any, codes: Tensor, scales: Tensor, format: Format, dtype: torch.dtype) -> "QuantizedTensor":
        made: Any = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scales, made.format = codes, scales, format
        return made

    def decoded(self) -> Tensor:
        """Returns the numbers, as a plain tensor."""
        return self.format.decode(self.codes, self.scales, self.dtype)

    def __repr__(self, **kwargs: object) -> str:
        return f"QuantizedTensor({tuple(self.shape)}, {self.dtype}, stored in {self.format.name})"

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and isinstance(args[0], QuantizedTensor):
            raise RuntimeError(f"{func} would write to keys or values that are quantized: use kv_cache=None")
        args, kwargs = tree_map_only(QuantizedTensor, QuantizedTensor.decoded, (args, kwargs or {}))
        return func(*args, **kwargs)
