"""Weight-only int8: one symmetric scale per output channel, activations left as they are.

A weight becomes ``scale[out] * integer[out, in]`` with integers from -127 to 127. Few rows run through torch's packed
int8 kernel, which reads half of bfloat16's bytes. It reads them again for every four rows, and bfloat16's own
kernels use the processor's dot products; so beyond ``KERNEL_ROWS`` rows the same numbers, scale x integer rounded to
the model's dtype, are multiplied by the usual kernel. That keeps the cost at bfloat16's there and makes the two paths
one function up to rounding.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.quantization.base import QuantizedLinear, replace_linears

KERNEL_ROWS = 8
"""Rows up to which the int8 kernel is used. It works on blocks of four: against bfloat16's kernel on a processor with
AVX512-BF16, up to 4 rows take about half the time, 5 to 8 three quarters, 9 to 12 about as long, and more rows longer
(``benchmarks/int8.py``)."""

_KERNEL_STEP = 16  # the kernel loads as many inputs at a time, at aligned addresses, and has no code for a remainder
_KERNEL_ALIGNMENT = 32  # bytes


class Int8Linear(QuantizedLinear):
    """A linear layer with int8 weights.

    Args:
        weight: What to quantize; its dtype is that of the activations.
        bias: Added in the activations' dtype.
        keep_copy: Keep scale x integer in the activations' dtype too, for many rows and for what the kernel cannot do
            (dtypes other than bfloat16, devices other than the CPU, input widths that are no multiple of 16). Three
            bytes per weight instead of two for bfloat16. Without the copy it is computed anew in every such forward.

    Attributes:
        weight: The integers.
        scale: Per output channel, in the activations' dtype.
        bias: As given.
        copy: Scale x integer, or None.
    """

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None, *, keep_copy: bool = True):
        super().__init__()
        integers, scale = to_int8(weight)
        self.weight = nn.Parameter(integers, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
        self.scale: Tensor
        self.register_buffer("scale", scale)
        self.copy: Tensor | None
        self.register_buffer("copy", from_int8(integers, scale) if keep_copy else None, persistent=False)

    def forward(self, inputs: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        if not self._kernel_takes(inputs.numel() // inputs.shape[-1]):
            return F.linear(inputs, from_int8(self.weight, self.scale) if self.copy is None else self.copy, self.bias)
        rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()
        if rows.data_ptr() % _KERNEL_ALIGNMENT:
            rows = rows.clone()
        outputs = torch._weight_int8pack_mm(rows, self.weight, self.scale)
        if self.bias is not None:
            outputs += self.bias
        return outputs.view(*inputs.shape[:-1], outputs.shape[1])

    def bytes_read(self, rows: int) -> int:
        bias = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        if self.copy is not None and not self._kernel_takes(rows):
            return bias + self.copy.numel() * self.copy.element_size()
        return bias + self.weight.numel() + self.scale.numel() * self.scale.element_size()

    def _kernel_takes(self, rows: int) -> bool:
        fits = self.scale.dtype is torch.bfloat16 and self.weight.shape[1] % _KERNEL_STEP == 0
        return rows <= KERNEL_ROWS and fits and self.weight.device.type == "cpu"


def to_int8(weight: Float[Tensor, "out in"]) -> tuple[Int8[Tensor, "out in"], Float[Tensor, " out"]]:
    """Integers and scales of a weight: for (0.5, -1.0, 0.25), (64, -127, 32) and 1 / 127."""
    largest = weight.float().abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / 127, 1.0).to(weight.dtype)
    # Divided by the scale as it is stored, so that its own rounding does no harm.
    integers = (weight.float() / scale.float()[:, None]).round().clamp(-127, 127)
    return integers.to(torch.int8).contiguous(), scale


def from_int8(integers: Int8[Tensor, "out in"], scale: Float[Tensor, " out"]) -> Float[Tensor, "out in"]:
    """Scale x integer, in the scale's dtype; an integer is exact there, so this rounds once."""
    return integers.to(scale.dtype) * scale[:, None]


def with_copies(model: PreTrainedModel) -> PreTrainedModel:
    """Quantize all linear layers, keeping the copies for many rows: a byte per weight more, and never slower."""
    replace_linears(model, lambda weight, bias: Int8Linear(weight, bias, keep_copy=True))
    return model


def compact(model: PreTrainedModel) -> PreTrainedModel:
    """Quantize all linear layers without the copies: half of bfloat16's memory, slow beyond ``KERNEL_ROWS`` rows."""
    replace_linears(model, lambda weight, bias: Int8Linear(weight, bias, keep_copy=False))
    return model
