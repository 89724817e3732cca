"""A quantized linear layer that chooses its product by the number of rows.

Few rows are bound by the bytes of the weights, and a kernel that reads the quantized ones is fast. Many rows are bound
by arithmetic, and full precision's own kernels are fast, on weights that were dequantized before. Both compute the same
function up to the rounding of sums: inputs are never quantized.

In float32, that function includes a rounding of the layer's inputs and outputs to bfloat16: torch's kernels for few
rows take no other inputs, and the product for many rows rounds likewise. So two forwards of other shapes differ where
such a rounding falls the other way, in about one output of ten thousand, and not in all.
"""

import sys
from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from specdec.execution.frozen import epoch
from specdec.execution.packing import PackedWeight, can_pack, packing_allowed
from specdec.execution.products import PanelWeight
from specdec.kernels import obstacle
from specdec.machine import native_bfloat16
from specdec.native import is_plain
from specdec.quantization.base import QuantizedLinear

KERNEL_ROWS = 4
"""Rows up to which the kernels are faster in bfloat16 where the CPU multiplies it itself: they work on blocks of four
rows, and full precision's packed product takes eight in the time of two blocks."""
KERNEL_ROWS_FLOAT32 = 8
"""The same in float32, whose packed product reads four bytes per weight."""
COMPACT_ROWS = 64
"""The same where no copy is kept: full precision's product must dequantize first."""
CUDA_ROWS = 1024
"""Rows up to which the Triton kernel is taken to be faster on a GPU than dequantizing first, which by its bytes takes
an H100 17 ms (fp8) to 29 ms (int4) for an 8B. Measured there, 72 rows take 1.12 to 1.27 of full precision's time; that
1,024 take less than 17 ms more is by counts of instructions."""

_ALIGNMENT = 32  # bytes, of the inputs: torch's int8 kernel crashes elsewhere


def kernel_rows(dtype: torch.dtype, device: torch.device, *, copied: bool) -> int:
    """Returns the number of rows up to which a kernel on the quantized weights is the faster product.

    Args:
        copied: Whether a dequantized copy is kept for many rows.
    """
    if device.type == "cuda":
        return CUDA_ROWS if dtype in (torch.float32, torch.bfloat16, torch.float16) and obstacle(device) is None else 0
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return 0
    if dtype is torch.bfloat16 and not _native():
        return sys.maxsize  # full precision's products are emulated, and slower for any number of rows
    if not copied:
        return COMPACT_ROWS
    return KERNEL_ROWS if dtype is torch.bfloat16 else KERNEL_ROWS_FLOAT32


def gpu_words(weight: Tensor) -> Tensor:
    """Returns stored weights as the Triton kernel reads them, a view where rows have whole words."""
    from specdec.kernels.products import words_of  # imports Triton

    return words_of(weight)


def gpu_product(inputs: Tensor, words: Tensor, scale: Tensor, scheme: Literal["int4", "int8", "fp8"]) -> Tensor:
    """Returns the product through the Triton kernel, on what ``gpu_words`` returned."""
    from specdec.kernels.products import multiply

    return multiply(inputs, words, scale, scheme)


@cache
def _native() -> bool:
    """Asked in every layer of every forward, so the answer is kept."""
    return native_bfloat16()


class DispatchedLinear(QuantizedLinear):
    """A linear layer with quantized weights, a kernel for few rows, and full precision's product for many.

    Args:
        scale: Factors in the activations' dtype.
        bias: Added in the activations' dtype.
        keep_copy: Keep the dequantized weights too, on a CPU, for many rows and for what the kernel cannot do. The copy
            is made at the first forward that needs it, and again when the weights have changed. Without a copy, these
            numbers are computed in every such forward, as they are on other devices.

    Attributes:
        weight, scale, bias, keep_copy: As given.
    """

    scale: Tensor

    def __init__(
        self,
        stored: Tensor,
        scale: Tensor,
        bias: Float[Tensor, " out"] | None,
        *,
        in_features: int,
        keep_copy: bool,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, stored.shape[0]
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
        self.register_buffer("scale", scale)
        self.keep_copy = keep_copy
        self._forget()

    @abstractmethod
    def dequantized(self) -> Float[Tensor, "out in"]:
        """Returns the weights as numbers in the scale's dtype, computed now."""

    @abstractmethod
    def kernel_form(self) -> object | None:
        """Returns the weights as ``kernel`` reads them on this device; None if it cannot be used."""

    @abstractmethod
    def kernel(self, inputs: Float[Tensor, "row in"], form: Any) -> Float[Tensor, "row out"]:
        """Returns the product without the bias, on what ``kernel_form`` returned, in the inputs' dtype.

        Inputs are contiguous, and in bfloat16 if the scale is in float32.
        """

    @property
    def rounds_to(self) -> torch.dtype | None:
        return torch.bfloat16 if self.scale.dtype is torch.float32 else None

    def forward(self, inputs: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        form = None
        # Neither the kernels nor packed products have a derivative. Under autocast, inputs may have another dtype.
        if inputs.numel() and not inputs.requires_grad and inputs.dtype is self.scale.dtype:
            if is_plain(inputs) and (panels := self.panels()) is not None:
                return panels(inputs, self.bias)
            form = self.form_for(inputs.numel() // inputs.shape[-1])
        if form is None:
            return self._by_copy(inputs)
        outputs = self.by_kernel(inputs.reshape(-1, inputs.shape[-1]).contiguous(), form)
        return outputs.view(*inputs.shape[:-1], outputs.shape[1])

    def panels_form(self) -> PanelWeight | None:
        """Returns this project's C for a CPU, from the weights of now; None if it does not take them."""
        return None

    def panels(self) -> PanelWeight | None:
        """Returns this project's own product for any number of rows; None if they go through others."""
        # `plain_weights` forbids what is no torch operation, and a compiler could not look into it.
        if self.weight.device.type != "cpu" or not packing_allowed() or torch.compiler.is_compiling():
            return None
        return self._once("panels", self.panels_form)

    def by_kernel(self, rows: Float[Tensor, "row in"], form: object) -> Float[Tensor, "row out"]:
        """Returns the layer's outputs through its kernel, on what ``form_for`` returned."""
        if self.scale.dtype is torch.float32:
            outputs = self.kernel(rows.bfloat16(), form).float()
        else:
            outputs = self.kernel(rows.clone() if rows.data_ptr() % _ALIGNMENT else rows, form)
        if self.bias is not None:
            outputs += self.bias
        return outputs

    def bytes_read(self, rows: int) -> int:
        bias = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        by_copy = self.keep_copy and self.weight.device.type == "cpu" and not self._takes(rows)
        if by_copy and self.panels() is None:
            return bias + self.num_weights * self.scale.element_size()
        return bias + self.stored_bytes()

    def stored_bytes(self) -> int:
        """Returns the bytes of the quantized weights and their scales, as the kernel reads them."""
        return self.weight.numel() * self.weight.element_size() + self.scale.numel() * self.scale.element_size()

    def _by_copy(self, inputs: Tensor) -> Tensor:
        """Returns full precision's product on the dequantized weights."""
        packed = None
        if inputs.numel() and not inputs.requires_grad and inputs.dtype is self.scale.dtype:
            packed = self._packed()
        rounds = self.rounds_to is not None and inputs.dtype is self.scale.dtype
        if rounds:
            inputs = inputs.bfloat16().float()
        bias = None if rounds else self.bias
        outputs = F.linear(inputs, self._plain(), bias) if packed is None else packed(inputs, bias)
        if rounds:
            outputs = outputs.bfloat16().float()
            outputs = outputs if self.bias is None else outputs + self.bias
        return outputs

    def _takes(self, rows: int) -> bool:
        return rows <= kernel_rows(self.scale.dtype, self.weight.device, copied=self.keep_copy)

    def form_for(self, rows: int) -> object | None:
        """Returns the weights as the kernel reads them; None if this many rows should not go through it."""
        return self._once("form", self.kernel_form) if self._takes(rows) else None

    def _packed(self) -> PackedWeight | None:
        """Returns the copy in oneDNN's layout; None if there is none, or if ``plain_weights`` forbids it."""
        if not self.keep_copy or not packing_allowed():
            return None
        return self._once("packed", lambda: PackedWeight(self.dequantized()) if can_pack(self.scale) else None)

    def _plain(self) -> Float[Tensor, "out in"]:
        """Returns the dequantized weights, and keeps them if ``keep_copy``."""
        if not self.keep_copy or self.weight.device.type == "cuda":
            return self.dequantized()
        return self._once("plain", self.dequantized)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns the result of ``make`` on the present weights and scales when it is first needed."""
        if self._epoch != epoch():
            self._forget()
        if name not in self._made:
            # An inference tensor could not be used later where the model runs outside of inference mode.
            with torch.inference_mode(False), torch.no_grad():
                self._made[name] = make()
        return self._made[name]

    # Dropped when the layer is pickled, copied, or moved to another device or dtype, when other tensors or numbers are
    # put in, and when somebody says that weights have changed (``specdec.execution.frozen``).

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_made": {}}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("weight", "scale"):
            self._forget()

    def _apply(self, *args: Any, **kwargs: Any) -> "DispatchedLinear":
        self._forget()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*args, **kwargs)

    def _forget(self) -> None:
        """Drop what was made of the weights and scales."""
        self._made: dict[str, Any] = {}
        self._epoch = epoch()
