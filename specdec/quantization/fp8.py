"""Weight-only fp8 (e4m3): one scale per output channel.

A weight becomes ``scale[out] * number[out, in]`` with numbers of e4m3, which have four significant bits and reach 448.
Small weights keep their relative precision, where int8's have the same absolute one. Only the weights are in fp8, so
any GPU that runs the Triton kernel will do, also one that does not compute with e4m3.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from specdec.quantization.dispatch import DispatchedLinear, gpu_product, gpu_words

LARGEST = 448.0
"""The largest number of e4m3."""


class Fp8Linear(DispatchedLinear):
    """A linear layer with e4m3 weights.

    Args:
        weight: What to quantize; its dtype is that of the activations.
        bias: Added in the activations' dtype.

    Attributes:
        weight: The numbers' bits in bytes: floating parameters would be changed whenever a model is cast.
        scale: One factor per output channel, in the activations' dtype.
    """

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None):
        bits, scale = to_fp8(weight)
        super().__init__(bits, scale, bias, in_features=weight.shape[1], keep_copy=False)

    def dequantized(self) -> Float[Tensor, "out in"]:
        return from_fp8(self.weight, self.scale)

    def kernel_form(self) -> Tensor | None:
        """Returns the numbers in words on CUDA; CPUs have no kernel."""
        return gpu_words(self.weight) if self.weight.device.type == "cuda" else None

    def kernel(self, inputs: Float[Tensor, "row in"], form: Tensor) -> Float[Tensor, "row out"]:
        return gpu_product(inputs, form, self.scale, "fp8")


def to_fp8(weight: Float[Tensor, "out in"]) -> tuple[UInt8[Tensor, "out in"], Float[Tensor, " out"]]:
    """Returns the bits of a weight's numbers, and the scales. The row (0.5, -1.0) gives 224 and -448 times 1 / 448."""
    largest = weight.float().abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0).to(weight.dtype)
    numbers = (weight.float() / scale.float()[:, None]).clamp(-LARGEST, LARGEST)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8).contiguous(), scale


def from_fp8(bits: UInt8[Tensor, "out in"], scale: Float[Tensor, " out"]) -> Float[Tensor, "out in"]:
    """Returns scale x number in the scale's dtype, where every number is exact, so this rounds once."""
    return bits.view(torch.float8_e4m3fn).to(scale.dtype) * scale[:, None]
