"""Norms and activations in this project's C on a CPU, for whatever class of module computes them.

Every library has classes of its own for root mean square norms (``native/norms.c``), which differ in three ways: the
small number in the root, whether 1 is added to the weight, and where 16-bit numbers are rounded. Which of them a module
does is found by trying. In plain torch a norm is five or more operations, which cost more than they compute.

Activations (``native/program.c``) are here for captured forwards, in which an activation and the product behind it are
one operation of C: a forward that is not captured has to give the same bits.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from specdec.counting import count_operation
from specdec.native import DTYPES, is_plain, native_library
from specdec.opaque import opaque

FUNCTIONS = {"silu": 0, "gelu_tanh": 1}
"""The numbers that the C has for activations."""

_EPS = ("variance_epsilon", "eps", "epsilon")
_WAYS = ((0.0, True), (0.0, False), (1.0, False), (1.0, True))
"""What is added to a norm's weight, and whether numbers are rounded before they are multiplied by it."""
_NORM_ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""The largest error of a norm, as a share of it: of other sums, and in bfloat16 of one step."""
_ACTIVATIONS = ("silu", "swish", "gelu")
_ACTIVATION_ERROR = 1e-6  # the largest, as a share of the number that the result is made from


def modules_in_c(model: nn.Module) -> Iterator[tuple[nn.Module, "Norm | Activation"]]:
    """Yield the norms and activations of a model that the C computes, each with a function that does so."""
    if native_library() is None:
        return
    for module in model.modules():
        found = None if "forward" in vars(module) else _norm(module) or _activation(module)
        if found is not None:
            yield module, found


def _norm(module: nn.Module) -> "Norm | None":
    """Return the norm that a module computes, in C; None if that is something else."""
    if "RMSNorm" not in type(module).__name__:
        return None
    weight = getattr(module, "weight", None)
    eps = next((getattr(module, name) for name in _EPS if isinstance(getattr(module, name, None), float)), None)
    if eps is None or not isinstance(weight, nn.Parameter) or len(list(module.parameters())) != 1:
        return None
    if weight.dim() != 1 or weight.dtype not in DTYPES or weight.device.type != "cpu":
        return None
    with torch.inference_mode():
        inputs = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        try:
            wanted = module(inputs)
        except Exception:  # of whatever else it takes
            return None
        ways = [Norm(module, eps, *way) for way in _WAYS]
        errors = [float(((way(inputs) - wanted).abs() / wanted.abs().clamp(min=1e-3)).max()) for way in ways]
    best = min(range(len(ways)), key=errors.__getitem__)
    return ways[best] if errors[best] <= _NORM_ERRORS[weight.dtype] else None


def _activation(module: nn.Module) -> "Activation | None":
    """Return the activation that a module computes, in C; None if that is something else."""
    named = any(name in type(module).__name__.lower() for name in _ACTIVATIONS)
    if not named or list(module.parameters()) or list(module.children()):
        return None
    numbers = torch.linspace(-12, 12, 97)
    with torch.inference_mode():
        try:
            wanted = module(numbers)
        except Exception:  # of whatever else it takes
            return None
        for name in FUNCTIONS:
            activation = Activation(module, name)
            if bool(((activation(numbers) - wanted).abs() <= _ACTIVATION_ERROR * numbers.abs()).all()):
                return activation
    return None


class Norm:
    """A module's norm in C, with its present weight.

    Attributes:
        options: eps, what is added to the weight, and whether numbers are rounded before they are multiplied by it.
    """

    def __init__(self, module: nn.Module, eps: float, offset: float, rounds: bool):
        self._module, self.options = module, (eps, offset, rounds)
        library = native_library()
        assert library is not None, "asked by `modules_in_c`"
        self._function: Any = library.normalize

    def __call__(self, inputs: Tensor, *others: Any, **named: Any) -> Tensor:
        """Return the norm of the last axis; the module's own with other arguments, such as a gate."""
        weight = self._module._parameters["weight"]
        assert weight is not None
        other = others or named or inputs.dtype is not weight.dtype or torch.is_autocast_enabled("cpu")
        if other or not is_plain(inputs) or inputs.numel() == 0:
            return type(self._module).forward(self._module, inputs, *others, **named)
        return opaque(self._normalize, inputs, weight)

    def _normalize(self, inputs: Tensor, weight: Tensor) -> Tensor:
        inputs = inputs.contiguous()
        outputs = torch.empty_like(inputs)
        width = inputs.shape[-1]
        rows = inputs.numel() // width
        given = inputs.data_ptr(), weight.data_ptr(), outputs.data_ptr(), rows, width, rows, 0, width
        self._function(*given, *self.options, DTYPES[inputs.dtype])
        count_operation("norm")
        return outputs


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
        assert library is not None, "asked by `modules_in_c`"
        inputs = inputs.contiguous()
        outputs = torch.empty_like(inputs)
        given = inputs.data_ptr(), outputs.data_ptr(), inputs.numel()
        library.activate(*given, FUNCTIONS[self.function], DTYPES[inputs.dtype])
        count_operation("activation")
        return outputs
