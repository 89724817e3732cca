"""Root mean square norms in this project's C on a CPU (``native/norms.c``), for whatever class of module computes them.

Every library has classes of its own, which differ in three ways: the small number in the root, whether 1 is added to
the weight, and where 16-bit numbers are rounded. Which of them a module does is found by trying. In plain torch a norm
is five or more operations, which cost more than they compute.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from specdec.counting import count_operation
from specdec.native import DTYPES, is_plain, native_library
from specdec.opaque import opaque

Forward = Callable[[Tensor], Tensor]

_EPS = ("variance_epsilon", "eps", "epsilon")
_WAYS = (
    (0.0, True),
    (0.0, False),
    (1.0, False),
    (1.0, True),
)  # what is added to the weight, and whether it rounds first
_ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""The largest error of a result, as a share of it: of other sums, and in bfloat16 of one step."""


def norms_in(model: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield the norms of a model that the C computes, each with a function that does so."""
    if native_library() is None:
        return
    for module in model.modules():
        if "RMSNorm" in type(module).__name__ and "forward" not in vars(module):
            forward = _forward(module)
            if forward is not None:
                yield module, forward


def _forward(module: nn.Module) -> Forward | None:
    """Return what a module computes, in C; None if that is something else."""
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
    return ways[best] if errors[best] <= _ERRORS[weight.dtype] else None


class Norm:
    """A module's norm in C, with its present weight.

    Attributes:
        options: eps, what is added to the weight, and whether numbers are rounded before they are multiplied by it.
    """

    def __init__(self, module: nn.Module, eps: float, offset: float, rounds: bool):
        self._module, self.options = module, (eps, offset, rounds)
        library = native_library()
        assert library is not None, "asked by `norms_in`"
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
