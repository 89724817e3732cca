"""Weight-only int8: one symmetric scale per output channel.

A weight becomes ``scale[out] * integer[out, in]`` with integers from -127 to 127.
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from specdec.execution.products import int8_panels
from specdec.quantization.base import QuantizedLinear


def to_int8(weight: Float[Tensor, "out in"]) -> tuple[Int8[Tensor, "out in"], Float[Tensor, " out"]]:
    """Returns a weight's integers and scales. The row (0.5, -1.0, 0.25) gives (64, -127, 32) and 1 / 127.

    A float32 scale is one that bfloat16 holds, for the kernels.
    """
    largest = torch.maximum(weight.amax(dim=1), -weight.amin(dim=1)).float()
    scale = torch.where(largest > 0, largest / 127, 1.0)
    scale = scale.bfloat16().float() if weight.dtype is torch.float32 else scale.to(weight.dtype)
    # Divided by the stored scale, which may be rounded: then its rounding does no harm.
    integers, rows = torch.empty_like(weight, dtype=torch.int8).contiguous(), max(1, (1 << 19) // weight.shape[1])
    for part, of, into in zip(weight.split(rows), scale.split(rows), integers.split(rows), strict=True):
        into.copy_((part.float() / of.float()[:, None]).round_().clamp_(-127, 127))
    return integers, scale


def from_int8(integers: Int8[Tensor, "out in"], scale: Float[Tensor, " out"]) -> Float[Tensor, "out in"]:
    """Returns scale x integer in the scale's dtype, where every integer is exact, so this rounds once."""
    return integers.to(scale.dtype) * scale[:, None]


class Int8Linear(QuantizedLinear):
    """A linear layer with int8 weights; the dtype of the weight given is that of the activations."""

    scheme, store, numbers = "int8", staticmethod(to_int8), staticmethod(from_int8)
    pack = staticmethod(int8_panels)
