"""Attention over a ragged cache: ``call`` for what a backend is, one file per backend, ``masks`` for dense ones.

To add a backend: a file with a subclass of ``AttentionBackend``, and its name in ``BACKENDS``.
"""

from specdec.attention.call import AttentionBackend
from specdec.attention.grouped import DenseAttention, EagerAttention, GroupedAttention
from specdec.attention.native import NativeAttention
from specdec.attention.triton import TritonAttention

BACKENDS: dict[str, AttentionBackend] = {
    "triton": TritonAttention(),
    "native": NativeAttention(),
    "grouped": GroupedAttention(),
    "dense": DenseAttention(),
    "eager": EagerAttention(),
}
"""What ``attention=`` names, in the order in which ``"auto"`` tries those that say they are for it (``automatic``)."""

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "DenseAttention",
    "EagerAttention",
    "GroupedAttention",
    "NativeAttention",
    "TritonAttention",
]
