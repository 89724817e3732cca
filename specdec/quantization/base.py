"""What every quantization of linear layers shares: the layer's interface, the replacement, and the count of bytes."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec.quantization.stored import is_packed, own_numel, packed_layer, stored_bytes


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights.

    Attributes:
        weight: What is stored, one row per output channel, so that code which asks an output layer for the size of its
            vocabulary finds it. Below eight bits a row holds several numbers per element: ``in_features`` counts them.
        in_features: The width of the inputs.
        out_features: The width of the outputs.
    """

    weight: nn.Parameter
    in_features: int
    out_features: int

    @property
    def num_weights(self) -> int:
        """The number of weights that are stored."""
        return self.in_features * self.out_features

    @property
    @abstractmethod
    def rounds_to(self) -> torch.dtype | None:
        """The dtype that inputs and outputs are rounded to, if that is coarser than the model's; None if it is not."""

    @abstractmethod
    def bytes_read(self, rows: int) -> int:
        """Returns the bytes of weights that a forward of this many rows reads."""


@dataclass(frozen=True)
class WeightsRead:
    """Weights that one forward reads.

    Attributes:
        bytes: Their size as the forward finds them, scales included.
        weights: The number of weights.
    """

    bytes: int
    weights: int

    @property
    def bytes_per_weight(self) -> float:
        """The bytes that are read per weight: 2 in bfloat16, little more than 1 in int8."""
        return self.bytes / self.weights


def weights_read(model: PreTrainedModel, rows: int = 1, copies: Mapping[int, int] | None = None) -> WeightsRead:
    """Returns the weights that one forward reads at least once.

    These are all parameters except embedding tables, of which a forward reads only one row per token. A table that the
    output layer shares counts. The experts of a mixture count as if all were read.

    Args:
        model: Any causal LM, quantized or not.
        rows: Tokens of the forward, over all sequences. A quantized layer may read other numbers for few rows than for
            many.
        copies: The bytes of copies that are read in the place of parameters, by the parameter's ``id``
            (``Executor.copies``); None counts what the model itself stores.
    """
    copies = copies or {}
    output = model.get_output_embeddings()
    shared = getattr(output, "weight", None)
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is not shared}
    counted: set[int] = set()
    size = weights = 0
    for module in model.modules():
        quantized = isinstance(module, QuantizedLinear)
        if quantized:
            size += module.bytes_read(rows)
        elif is_packed(module):  # by another library
            packed, count = packed_layer(module)
            size, weights = size + packed, weights + count
            continue
        for parameter in module.parameters(recurse=False):
            if id(parameter) in looked_up or id(parameter) in counted:
                continue
            counted.add(id(parameter))
            weights += module.num_weights if quantized and parameter is module.weight else own_numel(parameter)
            size += 0 if quantized else copies.get(id(parameter), stored_bytes(parameter))
    return WeightsRead(size, weights)


def num_weights(model: PreTrainedModel) -> int:
    """Returns the number of a model's weights, several of which may be stored in one byte."""
    quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    return model.num_parameters() + sum(module.num_weights - module.weight.numel() for module in quantized)


def input_width(layer: nn.Module) -> int:
    """Returns the width of a linear layer's inputs, quantized or not."""
    if isinstance(layer, QuantizedLinear):
        return layer.in_features
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.shape[1]


def rounded_to(model: nn.Module) -> torch.dtype | None:
    """Returns the dtype that a model's quantized layers round to; None if none of them rounds more than the model."""
    found = (module.rounds_to for module in model.modules() if isinstance(module, QuantizedLinear))
    return next((dtype for dtype in found if dtype is not None), None)


def replace_linears(model: PreTrainedModel, make: Callable[[Tensor, Tensor | None], QuantizedLinear]) -> int:
    """Put quantized layers in place of a model's linear ones, the output layer included.

    An output layer that shares the embedding's table gets integers of its own, and the table stays for the look-ups.
    GPT-2's ``Conv1D`` is a linear layer with the weight transposed. Experts of a mixture that are stored as one 3-D
    parameter are not linear layers and are not replaced.

    Args:
        model: Changed in place.
        make: Makes a layer from a weight of shape (out, in) and a bias.

    Returns:
        The number of layers that were replaced.
    """
    replaced: dict[nn.Module, QuantizedLinear] = {}
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
            setattr(parent, name, replaced[module])
    return len(replaced)
