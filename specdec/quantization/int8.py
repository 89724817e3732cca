"""Weight-only int8: one symmetric scale per output channel.

A weight becomes ``scale[out] * integer[out, in]`` with integers from -127 to 127. Few rows run through torch's packed
int8 kernel, which reads half of bfloat16's bytes and a quarter of float32's, and reads them again for every four rows;
on CUDA through a Triton kernel. ``dispatch.py`` says what happens to many rows.
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from specdec.execution.products import PanelWeight, int8_panels
from specdec.quantization.dispatch import DispatchedLinear, gpu_product, gpu_words

_KERNEL_STEP = 16  # torch's kernel loads as many inputs at a time, and has no code for a remainder
_ALIGNMENT = 16  # bytes, of the integers: with AVX512 its loads crash elsewhere, such as in a file that is mapped


class Int8Linear(DispatchedLinear):
    """A linear layer with int8 weights.

    Args:
        weight: What to quantize; its dtype is that of the activations.
        bias: Added in the activations' dtype.
        keep_copy: Keep scale x integer in the activations' dtype too, for many rows. In bfloat16: three bytes per
            weight instead of two.

    Attributes:
        weight: The integers.
        scale: One factor per output channel, in the activations' dtype.
    """

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None, *, keep_copy: bool = True):
        integers, scale = to_int8(weight)
        super().__init__(integers, scale, bias, in_features=weight.shape[1], keep_copy=keep_copy)

    def dequantized(self) -> Float[Tensor, "out in"]:
        return from_int8(self.weight, self.scale)

    def kernel_form(self) -> tuple[Tensor, Tensor] | None:
        """Returns the integers and scales as the kernel takes them."""
        if self.weight.device.type == "cuda":
            return gpu_words(self.weight), self.scale
        scale = self.scale.bfloat16()
        # A float32 scale that bfloat16 does not hold comes from a checkpoint of an earlier version.
        if self.in_features % _KERNEL_STEP or not torch.equal(scale.to(self.scale.dtype), self.scale):
            return None
        return (self.weight.clone() if self.weight.data_ptr() % _ALIGNMENT else self.weight), scale

    def panels_form(self) -> PanelWeight | None:
        return int8_panels(self.weight, self.scale)

    def kernel(self, inputs: Float[Tensor, "row in"], form: tuple[Tensor, Tensor]) -> Float[Tensor, "row out"]:
        if inputs.device.type == "cuda":
            return gpu_product(inputs, *form, "int8")
        return torch._weight_int8pack_mm(inputs, *form)


def to_int8(weight: Float[Tensor, "out in"]) -> tuple[Int8[Tensor, "out in"], Float[Tensor, " out"]]:
    """Returns a weight's integers and scales. The row (0.5, -1.0, 0.25) gives (64, -127, 32) and 1 / 127.

    A float32 scale is one that bfloat16 holds, for the kernels.
    """
    largest = weight.float().abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / 127, 1.0)
    scale = scale.bfloat16().float() if weight.dtype is torch.float32 else scale.to(weight.dtype)
    # Divided by the stored scale, which may be rounded: then its rounding does no harm.
    integers = (weight.float() / scale.float()[:, None]).round().clamp(-127, 127)
    return integers.to(torch.int8).contiguous(), scale


def from_int8(integers: Int8[Tensor, "out in"], scale: Float[Tensor, " out"]) -> Float[Tensor, "out in"]:
    """Returns scale x integer in the scale's dtype, where every integer is exact, so this rounds once."""
    return integers.to(scale.dtype) * scale[:, None]
