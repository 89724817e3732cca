"""This project's C for CPUs, and what compiles it (``library``): products, attention, and norms.

The C knows nothing but numbers and addresses. What is given to it stands with its callers: ``execution.products``,
``execution.norms`` and ``attention.native``.
"""

import torch

from specdec.native.library import SWITCH, native_library

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The numbers that the C has for the dtypes of a model."""

__all__ = ["DTYPES", "SWITCH", "native_library"]
