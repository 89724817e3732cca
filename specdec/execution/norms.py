"""Finds the norms and activations of a model by trying: every library has classes of its own for the same functions.

Root mean square norms differ in three ways: the small number in the root, whether 1 is added to the weight, and where
16-bit numbers are rounded. Programs on a CPU join an activation with the product behind it in C, so that a forward that
is not captured computes activations in C, too, for the same bits.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from specdec.counting import count_operation
from specdec.native.library import DTYPES, NORMALIZE, is_plain, native_library, perform
from specdec.opaque import opaque

FUNCTIONS = {"silu": 0, "gelu_tanh": 1}  # the numbers that the C has for activations
Forward = Callable[..., Any]
"""A function that takes the place of a module's ``forward``."""

_NORMS = ("RMSNorm", "L2Norm")
_EPS = ("variance_epsilon", "eps", "epsilon")
# Whether numbers are rounded before they are multiplied by a norm's weight, and what is added to that.
_WAYS = ((True, 0.0), (False, 0.0), (False, 1.0), (True, 1.0))
# The largest error of a norm, as a share of it: of other sums, and in 16 bits of one step.
_NORM_ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
_ACTIVATIONS = ("silu", "swish", "gelu")
_ACTIVATION_ERROR = 1e-6  # the largest, as a share of the number that the result is made from


@contextmanager
def lent(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Let modules compute by other functions during the ``with`` block, but for those with a ``forward`` of their own.

    As an attribute of the module, a function hides the method of its class.
    """
    free = [(vars(module), forward) for module, forward in forwards if "forward" not in vars(module)]
    for names, forward in free:
        names["forward"] = forward
    try:
        yield
    finally:
        for names, _ in free:
            del names["forward"]


def modules_in_c(model: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield the norms and activations of a model that the C computes, each with a function that does so."""
    if native_library() is None:
        return
    for module in model.modules():
        weight = module._parameters.get("weight")
        takes = weight is not None and weight.dtype in DTYPES and weight.device.type == "cpu"
        forward = (takes and norm_of(module, normalize)) or _activation_of(module)
        if forward:
            yield module, forward


def norm_of(module: nn.Module, function: Callable[..., Tensor]) -> Forward | None:
    """Return a module's ``forward`` by ``function(x, weight, eps, rounds, offset)``; None if it is something else."""
    options = _norm_options(module)
    if options is None:
        return None

    def forward(inputs: Tensor, *others: Any, **named: Any) -> Tensor:
        weight, device = module._parameters.get("weight"), inputs.device.type
        other = others or named or torch.is_autocast_enabled(device) or inputs.dim() > 4  # a gate, for one
        other = other or (weight is not None and inputs.dtype is not weight.dtype) or inputs.numel() == 0
        if other or (function is normalize and not is_plain(inputs)):
            return type(module).forward(module, inputs, *others, **named)
        return opaque(function, inputs, weight, *options, like=partial(torch.empty_like, inputs))

    return forward


def _norm_options(module: nn.Module) -> tuple[float, bool, float] | None:
    """Return eps, what is rounded, and what is added to the weight, of the root mean square norm that a module is."""
    if not any(name in type(module).__name__ for name in _NORMS) or "forward" in vars(module):
        return None
    weight = module._parameters.get("weight")
    eps = next((getattr(module, name) for name in _EPS if isinstance(getattr(module, name, None), float)), None)
    dtype = torch.float32 if weight is None else weight.dtype
    if eps is None or len(list(module.parameters())) != (weight is not None) or dtype not in _NORM_ERRORS:
        return None
    with torch.inference_mode(), _disable_current_modes():  # on numbers, even where the model has none
        width, drawn = 64 if weight is None else len(weight), torch.Generator().manual_seed(0)
        inputs, other = (torch.randn(rows, width, generator=drawn, device="cpu").to(dtype) for rows in (3, 1))
        state = {} if weight is None else {"weight": other[0]}
        try:
            wanted = torch.func.functional_call(module, state, (inputs,))
            found = [_normalized(inputs, state.get("weight"), eps, *way) for way in _WAYS]
            errors = [float(((each - wanted).abs() / wanted.abs().clamp(min=1e-3)).max()) for each in found]
        except Exception:  # of whatever else it takes
            return None
    best = min(range(len(_WAYS)), key=errors.__getitem__)
    return (eps, *_WAYS[best]) if errors[best] <= _NORM_ERRORS[dtype] else None


def _normalized(x: Tensor, weight: Tensor | None, eps: float, rounds: bool, offset: float) -> Tensor:
    """Return the norm of the last axis in plain torch."""
    numbers = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    numbers = numbers.to(x.dtype).float() if rounds else numbers
    return (numbers if weight is None else numbers * (weight.float() + offset)).to(x.dtype)


def _activation_of(module: nn.Module) -> Forward | None:
    """Return a module's ``forward`` in C; None if it is no activation that the C knows."""
    named = any(name in type(module).__name__.lower() for name in _ACTIVATIONS)
    if not named or "forward" in vars(module) or list(module.parameters()) or list(module.children()):
        return None
    numbers = torch.linspace(-12, 12, 97, device="cpu")
    with torch.inference_mode():
        try:
            wanted = module(numbers)
        except Exception:  # of whatever else it takes
            return None
        errors = {name: (activate(numbers, name) - wanted).abs() for name in FUNCTIONS}
    name = next((name for name in FUNCTIONS if bool((errors[name] <= _ACTIVATION_ERROR * numbers.abs()).all())), None)

    def forward(inputs: Tensor) -> Tensor:
        if inputs.dtype not in DTYPES or not is_plain(inputs) or inputs.device.type != "cpu" or inputs.requires_grad:
            return type(module).forward(module, inputs)
        return opaque(activate, inputs, name)

    return None if name is None else forward


def normalize(inputs: Tensor, weight: Tensor, eps: float, rounds: bool, offset: float) -> Tensor:
    """Return the norm of the last axis in C."""
    inputs = inputs.contiguous()
    outputs, width = torch.empty_like(inputs), inputs.shape[-1]
    addresses, rows = (inputs.data_ptr(), weight.data_ptr(), outputs.data_ptr()), inputs.numel() // width
    perform(NORMALIZE.pack(1, *addresses, rows, width, rows, 0, width, eps, offset, rounds, DTYPES[inputs.dtype]))
    count_operation("norm")
    return outputs


def activate(inputs: Tensor, function: str) -> Tensor:
    """Return an activation in C of each number."""
    library: Any = native_library()
    inputs = inputs.contiguous()
    outputs = torch.empty_like(inputs)
    library.activate(inputs.data_ptr(), outputs.data_ptr(), inputs.numel(), FUNCTIONS[function], DTYPES[inputs.dtype])
    count_operation("activation")
    return outputs
