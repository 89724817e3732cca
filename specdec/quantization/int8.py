"""Weight-only int8: one symmetric scale per output channel, activations left as they are.

A weight becomes ``scale[out] * integer[out, in]`` with integers from -127 to 127. Few rows run through torch's packed
int8 kernel, which reads half of bfloat16's bytes. It reads them again for every four rows, and bfloat16's own
kernels use the processor's dot products; so beyond ``KERNEL_ROWS`` rows the same numbers, scale x integer rounded to
the model's dtype, are multiplied by bfloat16's kernel (on packed weights, ``execution/packing.py``). This keeps cost
at bfloat16's there and makes the two paths one function up to rounding.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.execution.packing import PackedWeight, can_pack
from specdec.quantization.base import QuantizedLinear, replace_linears

KERNEL_ROWS = 4
"""Rows up to which the int8 kernel is used. It works on blocks of four, each of which takes longer than all of
bfloat16's packed kernel with up to nine rows (``benchmarks/int8.py``)."""

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
        copy: Scale x integer, packed where the processor has kernels for that; or None.
    """

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None, *, keep_copy: bool = True):
        super().__init__()
        integers, scale = to_int8(weight)
        self.weight = nn.Parameter(integers, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
        self.scale: Tensor
        self.register_buffer("scale", scale)
        copy = from_int8(integers, scale) if keep_copy else None
        self._packed = PackedWeight(copy) if copy is not None and can_pack(copy) else None
        self._copy: Tensor | None
        self.register_buffer("_copy", copy if self._packed is None else None, persistent=False)

    @property
    def copy(self) -> PackedWeight | Tensor | None:
        return self._packed or self._copy

    def forward(self, inputs: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        if not self._kernel_takes(inputs.numel() // inputs.shape[-1]):
            packed = self._packed
            if packed is not None and inputs.device.type == "cpu" and inputs.dtype is packed.dtype and inputs.numel():
                return packed(inputs, self.bias)
            return F.linear(inputs, from_int8(self.weight, self.scale) if self._copy is None else self._copy, self.bias)
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
            return bias + self.weight.numel() * self.scale.element_size()
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
