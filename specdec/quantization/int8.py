"""Weight-only int8: one symmetric scale per output channel, activations left as they are.

A weight becomes ``scale[out] * integer[out, in]`` with integers from -127 to 127. Few rows run through torch's packed
int8 kernel, which reads half of bfloat16's bytes. It reads them again for every four rows, and bfloat16's own
kernels use the processor's dot products; so beyond ``KERNEL_ROWS`` rows the same numbers, scale x integer rounded to
the model's dtype, are multiplied by bfloat16's kernel (on packed weights, ``execution/packing.py``). So many rows cost
what they do in bfloat16, and both paths compute the same function up to rounding.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.execution.packing import PackedWeight, can_pack, packing_allowed
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
            bytes per weight instead of two for bfloat16. The copy is made at the first forward that needs it, and again
            when the integers or scales have changed. Without a copy, these numbers are computed in every such forward.

    Attributes:
        weight: The integers.
        scale: One factor per output channel, in the activations' dtype.
        bias: As given.
        keep_copy: As given.
    """

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None, *, keep_copy: bool = True):
        super().__init__()
        self._replaced = 0  # how often other tensors took the place of the integers or scales
        integers, scale = to_int8(weight)
        self.weight = nn.Parameter(integers, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
        self.scale: Tensor
        self.register_buffer("scale", scale)
        self.keep_copy = keep_copy
        self._copies = _Copies()

    def forward(self, inputs: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        if inputs.requires_grad:  # neither the int8 kernel nor packed products have a derivative
            return F.linear(inputs, self._plain(), self.bias)
        if not self._kernel_takes(inputs.numel() // inputs.shape[-1]):
            packed = self._packed() if inputs.numel() and inputs.dtype is self.scale.dtype else None
            return F.linear(inputs, self._plain(), self.bias) if packed is None else packed(inputs, self.bias)
        rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()
        if rows.data_ptr() % _KERNEL_ALIGNMENT:
            rows = rows.clone()
        outputs = torch._weight_int8pack_mm(rows, self.weight, self.scale)
        if self.bias is not None:
            outputs += self.bias
        return outputs.view(*inputs.shape[:-1], outputs.shape[1])

    def bytes_read(self, rows: int) -> int:
        bias = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        if self.keep_copy and not self._kernel_takes(rows):
            return bias + self.weight.numel() * self.scale.element_size()
        return bias + self.weight.numel() + self.scale.numel() * self.scale.element_size()

    def version(self) -> tuple[object, ...]:
        tensors = (self.weight, self.scale)
        written = tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)
        return self._replaced, *written, *(tensor.data_ptr() for tensor in tensors), self.scale.dtype

    def _packed(self) -> PackedWeight | None:
        """Returns the copy in oneDNN's layout; None if there is none, or if ``plain_weights`` forbids it."""
        if not self.keep_copy or not packing_allowed():
            return None
        copies = self._fresh()
        if copies.packed is None and copies.may_pack is not False:
            copies.may_pack = can_pack(self.scale)
            if copies.may_pack:
                copies.packed = PackedWeight(from_int8(self.weight, self.scale))
        return copies.packed

    def _plain(self) -> Float[Tensor, "out in"]:
        """Returns scale x integer, and keeps it if ``keep_copy``."""
        if not self.keep_copy:
            return from_int8(self.weight, self.scale)
        copies = self._fresh()
        if copies.plain is None:
            # An inference tensor could not be multiplied later where gradients of the inputs are wanted.
            with torch.inference_mode(False), torch.no_grad():
                copies.plain = from_int8(self.weight, self.scale)
        return copies.plain

    def _fresh(self) -> "_Copies":
        """Returns the copies made from the present integers and scales."""
        version = self.version()
        if self._copies.version != version:
            self._copies = _Copies(version)
        return self._copies

    # The copies can be made again from the integers and scales. So they are dropped when the layer is pickled, copied,
    # or moved to another device or dtype, and when other numbers are loaded.

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_copies": _Copies()}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("weight", "scale"):
            self._forget()

    def _apply(self, *args: Any, **kwargs: Any) -> "Int8Linear":
        self._forget()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*args, **kwargs)

    def _forget(self) -> None:
        """Drop the copies. A counter, because a new tensor may stand where a freed one stood, with its version."""
        self._replaced += 1
        self._copies = _Copies()

    def _kernel_takes(self, rows: int) -> bool:
        fits = self.scale.dtype is torch.bfloat16 and self.weight.shape[1] % _KERNEL_STEP == 0
        return rows <= KERNEL_ROWS and fits and self.weight.device.type == "cpu"


@dataclass
class _Copies:
    """Scale x integer of one layer, made when it is first needed.

    Attributes:
        version: ``Int8Linear.version`` of the numbers that the copies were made from.
        may_pack: Whether there is a packed kernel for them; None if that was not asked yet.
        packed: The copy in oneDNN's layout, for the CPU.
        plain: The copy as an ordinary weight, for everything else.
    """

    version: tuple[object, ...] = ()
    may_pack: bool | None = None
    packed: PackedWeight | None = None
    plain: Tensor | None = None


def to_int8(weight: Float[Tensor, "out in"]) -> tuple[Int8[Tensor, "out in"], Float[Tensor, " out"]]:
    """Returns a weight's integers and scales. The row (0.5, -1.0, 0.25) gives (64, -127, 32) and 1 / 127."""
    largest = weight.float().abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / 127, 1.0).to(weight.dtype)
    # Divided by the stored scale, which may be rounded: then its rounding does no harm.
    integers = (weight.float() / scale.float()[:, None]).round().clamp(-127, 127)
    return integers.to(torch.int8).contiguous(), scale


def from_int8(integers: Int8[Tensor, "out in"], scale: Float[Tensor, " out"]) -> Float[Tensor, "out in"]:
    """Returns scale x integer in the scale's dtype, where every integer is exact, so this rounds once."""
    return integers.to(scale.dtype) * scale[:, None]


def with_copies(model: PreTrainedModel) -> PreTrainedModel:
    """Quantize all linear layers, keeping the copies for many rows: a byte per weight more, and never slower."""
    replace_linears(model, lambda weight, bias: Int8Linear(weight, bias, keep_copy=True))
    return model


def compact(model: PreTrainedModel) -> PreTrainedModel:
    """Quantize all linear layers without the copies: half of bfloat16's memory, slow beyond ``KERNEL_ROWS`` rows."""
    replace_linears(model, lambda weight, bias: Int8Linear(weight, bias, keep_copy=False))
    return model
