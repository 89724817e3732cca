"""Activations in this project's C on a CPU (``native/program.c``), for whatever class of module computes them.

They are here for captured forwards, in which an activation and the product behind it are one operation of C: a forward
that is not captured has to give the same bits.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specdec.counting import count_operation
from specdec.native import DTYPES, is_plain, native_library
from specdec.opaque import opaque

FUNCTIONS = {"silu": 0, "gelu_tanh": 1}
"""The numbers that the C has for them."""

_NAMES = ("silu", "swish", "gelu")
_ERROR = 1e-6  # the largest error of a result, as a share of the number that it is made from


def activations_in(model: nn.Module) -> Iterator[tuple[nn.Module, "Activation"]]:
    """Yield the activations of a model that the C computes, each with a function that does so."""
    if native_library() is None:
        return
    for module in model.modules():
        named = any(name in type(module).__name__.lower() for name in _NAMES)
        if named and "forward" not in vars(module) and not list(module.parameters()) and not list(module.children()):
            activation = _activation(module)
            if activation is not None:
                yield module, activation


def _activation(module: nn.Module) -> "Activation | None":
    """Return what a module computes, in C; None if that is something else."""
    numbers = torch.linspace(-12, 12, 97)
    with torch.inference_mode():
        try:
            wanted = module(numbers)
        except Exception:  # of whatever else it takes
            return None
        for name in FUNCTIONS:
            activation = Activation(module, name)
            if bool(((activation(numbers) - wanted).abs() <= _ERROR * numbers.abs()).all()):
                return activation
    return None


class Activation:
    """A module's activation in C.

    Attributes:
        function: Its name.
    """

    def __init__(self, module: nn.Module, function: str):
        self._module, self.function = module, function

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the function of each number."""
        if inputs.dtype not in DTYPES or not is_plain(inputs) or inputs.device.type != "cpu" or inputs.requires_grad:
            return type(self._module).forward(self._module, inputs)
        return opaque(self.compute, inputs)

    def compute(self, inputs: Tensor) -> Tensor:
        """See ``__call__``, which programs leave out."""
        library = native_library()
        assert library is not None, "asked by `activations_in`"
        inputs = inputs.contiguous()
        outputs = torch.empty_like(inputs)
        given = inputs.data_ptr(), outputs.data_ptr(), inputs.numel()
        library.activate(*given, FUNCTIONS[self.function], DTYPES[inputs.dtype])
        count_operation("activation")
        return outputs
