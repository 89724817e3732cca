"""Weight-only fp8 (e4m3): one scale per output channel. CPUs have no kernel for it.

A weight becomes ``scale[out] * number[out, in]`` with numbers of e4m3, which have four significant bits and reach 448.
Small weights keep their relative precision, where int8's have the same absolute one. Only the weights are in fp8, so
any GPU that runs the Triton kernel will do, also one that does not compute with e4m3. The numbers' bits are stored in
bytes: floating parameters would be changed whenever a model is cast.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from specdec.quantization.base import QuantizedLinear

LARGEST = 448.0
"""The largest number of e4m3."""


def to_fp8(weight: Float[Tensor, "out in"]) -> tuple[UInt8[Tensor, "out in"], Float[Tensor, " out"]]:
    """Returns the bits of a weight's numbers, and the scales. The row (0.5, -1.0) gives 224 and -448 times 1 / 448."""
    largest = weight.float().abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0).to(weight.dtype)
    numbers = (weight.float() / scale.float()[:, None]).clamp(-LARGEST, LARGEST)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8).contiguous(), scale


def from_fp8(bits: UInt8[Tensor, "out in"], scale: Float[Tensor, " out"]) -> Float[Tensor, "out in"]:
    """Returns scale x number in the scale's dtype, where every number is exact, so this rounds once."""
    return bits.view(torch.float8_e4m3fn).to(scale.dtype) * scale[:, None]


class Fp8Linear(QuantizedLinear):
    """A linear layer with e4m3 weights; the dtype of the weight given is that of the activations."""

    scheme, store, numbers = "fp8", staticmethod(to_fp8), staticmethod(from_fp8)
