"""Knows whether the host may look at a tensor's values without waiting for a device."""

from torch import Tensor

LOOKS_ARE_FREE = True
"""Tests set this to False, so that code on a CPU takes the branches that it would take on a GPU."""


def can_look(tensor: Tensor) -> bool:
    """Returns whether reading a value of this tensor is free. On a GPU it would make the host wait."""
    return LOOKS_ARE_FREE and tensor.device.type == "cpu"
