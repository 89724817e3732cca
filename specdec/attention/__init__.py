"""Attention over a ragged cache: one file per backend, ``masks`` for those that read a dense mask.

To add a backend: a file with a subclass of ``AttentionBackend``, and its name in ``BACKENDS``.
"""

from specdec.attention.base import AttentionBackend
from specdec.attention.flex import FlexAttention
from specdec.attention.grouped import GroupedAttention
from specdec.attention.own import OwnAttention
from specdec.attention.triton_tree import TritonAttention

BACKENDS: dict[str, AttentionBackend] = {
    "triton": TritonAttention(),
    "grouped": GroupedAttention(),
    "eager": OwnAttention(),
    "flex": FlexAttention(),
}
"""What ``attention=`` names, in the order in which ``"auto"`` tries those that say they are for it (``automatic``)."""

__all__ = ["BACKENDS", "AttentionBackend", "FlexAttention", "GroupedAttention", "OwnAttention", "TritonAttention"]
