"""A second device that is not there: tensors on it hold numbers, and no operation may mix them with those elsewhere."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

FAR = torch.device("meta")
"""What the tensors say that they are on. torch can index tensors of this kind of device on every machine."""

_MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class FarTensor(Tensor):
    """A tensor on the far device; its numbers lie on the CPU."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> "FarTensor":
        return Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype, device=FAR
        )

    def __init__(self, near: Tensor):
        self.near = near

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class FarDevice(TorchDispatchMode):
    """While it is entered, tensors can be made on the far device, and moved there and back."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    """Returns what an operation returns, on the device where all of its tensors are.

    Raises:
        RuntimeError: They are on different devices. (As everywhere in torch, numbers without an axis may be anywhere.)
    """
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor) and each.ndim]
    if len({isinstance(each, FarTensor) for each in tensors}) > 1 and function not in _MOVES:
        raise RuntimeError(f"{function} mixes tensors of two devices")
    goal = kwargs.get("device")
    far = isinstance(tensors[0], FarTensor) if goal is None and tensors else goal is not None and goal == FAR
    if goal is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    # Tensors made in inference mode would refuse to be viewed through a wrapper.
    with torch.inference_mode(torch.is_inference_mode_enabled() and not far), torch.no_grad():
        result = function(*tree_map(_near, args), **tree_map(_near, kwargs))
        if function is torch.ops.aten.copy_.default:
            return args[0]
        return tree_map(lambda each: FarTensor(each) if isinstance(each, Tensor) else each, result) if far else result


def _near(value: Any) -> Any:
    return value.near if isinstance(value, FarTensor) else value
