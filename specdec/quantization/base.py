"""Linear layers with quantized weights: the layer, its place in a model, and the bytes that weights take.

Few rows are bound by the bytes of the weights: this project's C on a CPU, and a Triton kernel on a GPU, read them as
they are stored. Where neither runs, and for many rows on a GPU, they are dequantized in every forward. In float32 a
layer's inputs and outputs are rounded to bfloat16, whatever computes them: kernels take no other inputs. The C
multiplies integers, of 16 bits for inputs (``native/products.c``). So one output of hundreds may be rounded to bfloat16
another way than by torch; with any number of rows it is the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec.execution.frozen import epoch
from specdec.execution.packing import only_plain
from specdec.execution.products import PanelWeight
from specdec.kernels import obstacle
from specdec.memory import clean_files, drop, give_back
from specdec.native import is_plain

CUDA_ROWS = 1024
"""Rows up to which the Triton kernel is taken to be faster on a GPU than dequantizing first, which by its bytes takes
an H100 17 ms (fp8) to 29 ms (int4) for an 8B. That 1,024 rows take less than that is by counts of instructions."""
CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights.

    Args:
        weight: What is quantized; its dtype is that of the activations.
        bias: Added in the activations' dtype.

    Attributes:
        scheme: What the weights are to the Triton kernel.
        store, numbers: Functions from a weight to what is stored and its scales, and back.
        pack: Returns weights and scales as this project's C reads them on a CPU; None if it does not take them.
        weight: What is stored, one row per output channel, so that code which asks an output layer for the size of its
            vocabulary finds it. Below eight bits a row holds several numbers per element: ``in_features`` counts them.
            On a CPU whole panels are in memory in its place until somebody reads it.
        scale: Factors in the activations' dtype.
    """

    scheme: ClassVar[Literal["int4", "int8", "fp8"]]
    store: ClassVar[Callable[[Tensor], tuple[Tensor, Tensor]]]
    numbers: ClassVar[Callable[[Tensor, Tensor], Tensor]]
    pack: ClassVar[Callable[[Tensor, Tensor], PanelWeight | None]] = staticmethod(lambda stored, scale: None)
    scale: Tensor

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None):
        super().__init__()
        (self.out_features, self.in_features), (stored, scale) = weight.shape, type(self).store(weight)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
        self.register_buffer("scale", scale)
        self._forget()

    def dequantized(self) -> Float[Tensor, "out in"]:
        """Return the weights as numbers in the scale's dtype, computed now."""
        return type(self).numbers(self.weight, self.scale)[:, : self.in_features].contiguous()

    @property
    def num_weights(self) -> int:
        """The number of weights that are stored."""
        return self.in_features * self.out_features

    @property
    def rounds_to(self) -> torch.dtype | None:
        """The dtype that inputs and outputs are rounded to, if that is coarser than the model's; None if it is not."""
        return torch.bfloat16 if self.scale.dtype is torch.float32 else None

    def bytes_read(self) -> int:
        """Return the bytes of weights, scales and bias that a forward reads."""
        return sum(t.nbytes for t in (self._parameters["weight"], self.scale, self.bias) if t is not None)

    def forward(self, inputs: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        # No kernel has a derivative. Under autocast, inputs may have another dtype.
        known = inputs.dtype is self.scale.dtype
        if known and inputs.numel() and not inputs.requires_grad:
            if is_plain(inputs) and (panels := self.panels()) is not None:
                return panels(inputs, self.bias)
            if self._for_kernel(inputs):
                rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()
                outputs = self._by_kernel(rows)
                outputs = outputs if self.bias is None else outputs.add_(self.bias)
                return outputs.view(*inputs.shape[:-1], outputs.shape[1])
        if not known or self.rounds_to is None:
            return F.linear(inputs, self.dequantized(), self.bias)
        outputs = F.linear(inputs.bfloat16().float(), self.dequantized()).bfloat16().float()
        return outputs if self.bias is None else outputs + self.bias

    def panels(self) -> PanelWeight | None:
        """Return this project's own product for a CPU; None if rows go through torch's."""
        # `plain_weights` forbids what is no torch operation, and a compiler could not look into it.
        if self.scale.device.type != "cpu" or only_plain.get() or torch.compiler.is_compiling():
            return None
        if self._made[:1] != [epoch()]:
            # An inference tensor could not be used later where the model runs outside of inference mode.
            with torch.inference_mode(False), torch.no_grad():
                self._made[:] = epoch(), self._placed()
        return self._made[1]

    def _placed(self) -> PanelWeight | None:
        """Return the weights in panels; the stored numbers lie in memory in this order alone if they fill them."""
        stored: Any = self.weight
        packed = type(self).pack(stored, self.scale)
        if packed is not None and packed.panels.nbytes == stored.nbytes and not stored.is_inference():
            stored.data, stored.packed = packed.panels.view(stored.shape), packed
            if stored.nbytes > 1 << 20:  # the allocator has no use for the hole beside the next weight of this size
                give_back()
        return packed

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name == "weight" and hasattr(value, "packed"):
            with torch.inference_mode(False), torch.no_grad():
                value.data = value.packed.unpacked()
            del value.packed
        return value

    def _for_kernel(self, inputs: Tensor) -> bool:
        return (
            inputs.device.type == "cuda"
            and inputs.dtype in CUDA_DTYPES
            and inputs.numel() <= CUDA_ROWS * inputs.shape[-1]
            and obstacle(inputs.device) is None
        )

    def _by_kernel(self, rows: Float[Tensor, "row in"]) -> Float[Tensor, "row out"]:
        """Return the product without the bias."""
        from specdec.kernels.products import multiply, words_of  # imports Triton

        words = words_of(self.weight)
        if self.rounds_to is None:
            return multiply(rows, words, self.scale, self.scheme)
        return multiply(rows.bfloat16(), words, self.scale, self.scheme).float()

    # Dropped when the layer is pickled, copied, or moved to another device or dtype, when other tensors or numbers are
    # put in, and when somebody says that weights have changed (``specdec.execution.frozen``).

    def __getstate__(self) -> dict[str, Any]:
        _ = self.weight  # in its own order
        return vars(self) | {"_made": []}

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        _ = self.weight
        super()._save_to_state_dict(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("weight", "scale"):
            self._forget()

    def _apply(self, *args: Any, **kwargs: Any) -> "QuantizedLinear":
        self._forget()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*args, **kwargs)

    def _forget(self) -> None:
        """Drop the panels, and have the stored numbers in their own order."""
        self._made: list[Any] = []  # the epoch and the panels
        _ = self.weight


@dataclass(frozen=True)
class WeightsRead:
    """The number of weights that one forward reads, and their bytes as the forward finds them, scales included."""

    bytes: int
    weights: int

    @property
    def bytes_per_weight(self) -> float:
        """The bytes that are read per weight: 2 in bfloat16, little more than 1 in int8."""
        return self.bytes / self.weights


def weights_read(model: PreTrainedModel, copies: Mapping[int, int] | None = None) -> WeightsRead:
    """Returns the weights that one forward reads at least once.

    These are all parameters except embedding tables, of which a forward reads only one row per token. A table that the
    output layer shares counts. The experts of a mixture count as if all were read.

    Args:
        model: Any causal LM, quantized or not.
        copies: The bytes of copies that are read in the place of parameters, by the parameter's ``id``
            (``Executor.copies``); None counts what the model itself stores.
    """
    copies = copies or {}
    output = model.get_output_embeddings()
    shared = None if isinstance(output, QuantizedLinear) else getattr(output, "weight", None)
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is not shared}
    counted: set[int] = set()
    size = weights = 0
    for module in model.modules():
        quantized = isinstance(module, QuantizedLinear)
        if quantized:
            size += module.bytes_read()
        elif is_packed(module):  # by another library
            packed, count = packed_layer(module)
            size, weights = size + packed, weights + count
            continue
        for parameter in module.parameters(recurse=False):
            if id(parameter) in looked_up or id(parameter) in counted:
                continue
            counted.add(id(parameter))
            own = module._parameters.get("weight")
            weights += module.num_weights if quantized and parameter is own else own_numel(parameter)
            size += 0 if quantized else copies.get(id(parameter), stored_bytes(parameter))
    return WeightsRead(size, weights)


def num_weights(model: PreTrainedModel) -> int:
    """Returns the number of a model's weights, several of which may be stored in one byte."""
    quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    return model.num_parameters() + sum(each.num_weights - own_numel(each._parameters["weight"]) for each in quantized)


def rounded_to(model: nn.Module) -> torch.dtype | None:
    """Returns the dtype that a model's quantized layers round to; None if none of them rounds more than the model."""
    found = (module.rounds_to for module in model.modules() if isinstance(module, QuantizedLinear))
    return next((dtype for dtype in found if dtype is not None), None)


def replace_linears(model: PreTrainedModel, make: Callable[[Tensor, Tensor | None], QuantizedLinear]) -> None:
    """Put quantized layers in place of a model's linear ones, the output layer included.

    An output layer that shares the embedding's table gets integers of its own, and the table stays for the look-ups.
    GPT-2's ``Conv1D`` is a linear layer with the weight transposed. Experts of a mixture that are stored as one 3-D
    parameter are not replaced. ``make`` makes a layer from a weight of shape (out, in) and a bias.
    """
    replaced, files = dict[nn.Module, QuantizedLinear](), clean_files()
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if not isinstance(module, (nn.Linear, Conv1D)):
                continue
            if module not in replaced:
                weight = module.weight.detach()
                bias = None if module.bias is None else module.bias.detach()
                replaced[module] = make(weight.t() if isinstance(module, Conv1D) else weight, bias)
                # A runner that takes hidden states watches the output layer's input.
                replaced[module]._forward_pre_hooks.update(module._forward_pre_hooks)
                drop(weight, files)
            setattr(parent, name, replaced[module])


def stored_bytes(tensor: Any) -> int:
    """Returns the bytes of a tensor as this process stores it.

    A tensor that is made of others (torchao's; a share of a tensor-parallel weight) takes what they take. bitsandbytes
    keeps scales as attributes of its integers.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        return sum(stored_bytes(getattr(tensor, name)) for name in flatten()[0])
    scales = (getattr(tensor, "SCB", None), getattr(getattr(tensor, "quant_state", None), "absmax", None))
    return sum(part.numel() * part.element_size() for part in (tensor, *scales) if isinstance(part, Tensor))


def own_numel(tensor: Any) -> int:
    """Returns the number of a tensor's elements that this process holds: its share under tensor parallelism."""
    return tensor.to_local().numel() if hasattr(tensor, "to_local") else tensor.numel()


def is_packed(module: nn.Module) -> bool:
    """Returns whether a linear layer's weights are stored as something else than a matrix of floating-point numbers."""
    if not hasattr(module, "in_features") or not hasattr(module, "out_features"):
        return False
    weight = module._parameters.get("weight")
    if weight is None:  # under other names; an adapter's or a parametrized layer's is in a module below
        return any(name != "bias" for name in (*module._parameters, *module._buffers))
    # Or its weight is of a class that neither torch nor this project has.
    return not weight.is_floating_point() or type(weight).__module__.split(".")[0] not in (torch.__name__, "specdec")


def packed_layer(module: Any) -> tuple[int, int]:
    """Returns the bytes and the number of weights of a layer for which ``is_packed`` is true."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    bias = getattr(module, "bias", None)
    weights = module.in_features * module.out_features + (bias.numel() if isinstance(bias, Tensor) else 0)
    return sum(stored_bytes(tensor) for tensor in tensors), weights


def output_width(layer: Any) -> int:
    """Returns the width of an output layer, whose weight may be packed."""
    width = getattr(layer, "out_features", None)
    return width if isinstance(width, int) else layer.weight.shape[0]
