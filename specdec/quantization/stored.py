"""How many bytes a module's numbers take, whoever has packed them."""

from typing import Any

import torch
from torch import Tensor, nn


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
