"""Weight-only int4: one scale for every 64 weights of a row.

A weight becomes ``scale[out, group] * integer[out, in]`` with integers from -8 to 7. The scales are rounded to five
significant bits. So bfloat16 and float16 hold every product of scale and integer exactly, and kernels multiply by the
same numbers as dequantized weights. The integers are chosen for the rounded scale, so its rounding costs next to
nothing.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from specdec.execution.products import GROUP, int4_panels
from specdec.quantization.base import QuantizedLinear

STEPS = (7.0, 7.5, 8.0, 8.5)
"""A group's largest weight is divided by these to get scales to try; the one with the least squared error is taken."""

_CHUNK = 1 << 18  # weights that are quantized at a time, so that intermediate results stay in a CPU's caches
_CHUNK_CUDA = 1 << 26  # so that a layer takes tens of kernels, and intermediate results no more than 2 GB


def to_int4(weight: Float[Tensor, "out in"]) -> tuple[UInt8[Tensor, "out bytes"], Float[Tensor, "out group"]]:
    """Returns a weight's integers, two per byte, and the scales of its groups.

    A row whose width is no multiple of ``GROUP`` has a last group that is smaller.
    """
    out, width = weight.shape
    groups = -(-width // GROUP)
    stored = torch.empty(out, -(-width // 2), dtype=torch.uint8, device=weight.device)
    scales = torch.empty(out, groups, dtype=weight.dtype, device=weight.device)
    if weight.is_meta:
        return stored, scales
    rows = max(1, (_CHUNK_CUDA if weight.is_cuda else _CHUNK) // max(1, width))
    for part, into, scale in zip(weight.split(rows), stored.split(rows), scales.split(rows), strict=True):
        grouped = F.pad(part.float(), (0, groups * GROUP - width)).view(part.shape[0], groups, GROUP)
        integers, chosen = _quantized(grouped)
        scale.copy_(chosen)
        even, odd = integers.view(part.shape[0], -1, 2).unbind(-1)
        into.copy_(torch.add(odd, even, alpha=16).add_(0x88)[:, : stored.shape[1]])
    return stored, scales


def from_int4(
    stored: UInt8[Tensor, "out bytes"], scale: Float[Tensor, "out group"], width: int | None = None
) -> Float[Tensor, "out in"]:
    """Returns scale x integer in the scale's dtype, without rounding."""
    padded = F.pad(stored, (0, scale.shape[1] * GROUP // 2 - stored.shape[1]), value=0x88)
    numbers = _integers(padded).view(*scale.shape, GROUP).to(scale.dtype) * scale[:, :, None]
    return numbers.view(stored.shape[0], -1)[:, :width].contiguous()


def _integers(stored: UInt8[Tensor, "out bytes"]) -> Tensor:
    """Returns the integers from -8 to 7, of shape (out, 2 * bytes)."""
    pairs = torch.stack([stored >> 4, stored & 15], dim=-1)
    return pairs.view(stored.shape[0], -1).to(torch.int8) - 8


def _quantized(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the integers and scales of groups of weights, of shape (out, group, GROUP).

    The weight that is largest in magnitude gets an integer near -8, which has one step more than 7: so the scale may be
    negative.
    """
    if groups.is_cuda:  # where a choice of rows makes the host wait
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    else:
        high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
        against = -low
        largest, both = torch.where(high > against, high, low), (high == against).squeeze(-1)
        some = groups[both]  # of which the first one counts
        largest[both] = some.gather(-1, some.abs().argmax(-1, keepdim=True))
    integers, best, least = torch.empty_like(groups), largest, torch.inf
    for steps in STEPS:
        scale = _five_bits(-largest / steps)
        scale = torch.where(scale == 0, 1.0, scale)
        error = _rounded(groups, scale, integers).mul_(scale).sub_(groups).square_().sum(-1, keepdim=True)
        # Written so that a NaN stays one.
        best, least = torch.where(error >= least, best, scale), torch.minimum(error, torch.as_tensor(least))
    return _rounded(groups, best, integers), best.squeeze(-1)


def _rounded(groups: Tensor, scale: Tensor, into: Tensor) -> Tensor:
    return torch.div(groups, scale, out=into).round_().clamp_(-8, 7)


def _five_bits(numbers: Tensor) -> Tensor:
    """Returns numbers rounded to five significant bits: 0.7 gives 0.6875."""
    mantissa, exponent = torch.frexp(numbers)
    return torch.ldexp((mantissa * 32).round() / 32, exponent)


class Int4Linear(QuantizedLinear):
    """A linear layer with int4 weights; the dtype of the weight given is that of the activations.

    Attributes:
        weight: Two integers per byte, of shape (out, in / 2 rounded up): the even one in the upper four bits, and 8
            added to both.
        scale: One factor per group, of shape (out, groups).
    """

    scheme, store, numbers = "int4", staticmethod(to_int4), staticmethod(from_int4)
    pack = staticmethod(int4_panels)

    def bytes_read(self) -> int:
        """See ``QuantizedLinear.bytes_read``. On a CPU the C reads scales in float32."""
        more = 0 if self.scale.device.type == "cuda" else 4 - self.scale.element_size()
        return super().bytes_read() + more * self.scale.numel()
