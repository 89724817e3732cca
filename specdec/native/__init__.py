"""This project's C for CPUs, and what compiles it (``library``): products, attention, and norms.

The C knows nothing but numbers and addresses. What is given to it stands with its callers: ``execution.products``,
``execution.norms`` and ``attention.native``.
"""

from specdec.native.library import SWITCH, native_library

__all__ = ["SWITCH", "native_library"]
