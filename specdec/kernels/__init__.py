"""Triton kernels for what happens between a model's forwards, each beside the operations of torch that it stands for.

Triton is imported when a kernel is first launched. On a CPU the operations of torch run; tests compare the two in
Triton's interpreter.
"""

import importlib.util
from functools import cache

from torch import Tensor


def usable(tensor: Tensor) -> bool:
    """Returns whether a kernel can take this tensor: it is on a CUDA device, and Triton is installed."""
    return tensor.device.type == "cuda" and _installed()


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
