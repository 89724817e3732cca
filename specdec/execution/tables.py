"""Tables of what a forward computes of its positions alone: the angles of rotary embeddings.

A captured forward looks them up instead of computing them, with the same bits: it is the forward's own operations that
fill the table, once for all positions.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from specdec.execution.fusion import with_others
from specdec.execution.program import Step, needed
from specdec.execution.rewriting import Layers

MOST_POSITIONS = 1 << 17
"""The longest table; with more, the angles are computed in every forward."""


class Looked(NamedTuple):
    """Rows of a table, in the place of a tensor ``[batch, 1, node, dim]``.

    Attributes:
        table: ``[position, dim]``.
        positions: ``[batch, node]``.
    """

    table: Tensor
    positions: Tensor


def with_tables(
    steps: list[Step], positions: Tensor, outputs: Sequence[Tensor], layers: Layers, count: int
) -> list[Step]:
    """Return steps whose turns (``Layers.turn``) look up cosines and sines that depend on positions alone.

    Args:
        steps: The steps of a forward; its tensors are alive.
        positions: The input that is looked up, ``[batch, node]``.
        outputs: Those of the forward.
        layers: The functions by which it reaches its cache.
        count: The number of positions that there are.
    """
    if count > MOST_POSITIONS:
        return steps
    makers = {id(tensor): step for step in steps for tensor in step.makes}
    tables: dict[int, Looked | None] = {}
    turned: list[Step] = []
    for step in steps:
        if step.function == layers.turn:
            layer, query, key, value, *angles, query_norm, key_norm = step.arguments
            for tensor in angles:
                if id(tensor) not in tables:
                    tables[id(tensor)] = _looked(tensor, makers, positions, count)
            found = [tables[id(tensor)] for tensor in angles]
            if None not in found:
                step = replace(step, arguments=(layer, query, key, value, *found, query_norm, key_norm))
        turned.append(step)
    return needed(turned, outputs)


def _looked(tensor: Tensor, makers: dict[int, Step], positions: Tensor, count: int) -> Looked | None:
    """Return a tensor's rows for all positions, if the steps that make it of some positions make them of all."""
    steps = _steps_to(tensor, makers, positions)
    if steps is None:
        return None
    rows = positions.shape[0]
    every = torch.arange(-(-count // rows) * rows, device=positions.device, dtype=positions.dtype).view(rows, -1)
    same = {id(positions): every}
    try:
        for step in steps:
            outputs = step.function(*with_others(step.arguments, same), **with_others(step.named, same))
            same[id(step.outputs)] = outputs
    except RuntimeError:  # an operation has the number of nodes in it
        return None
    made, dim = same[id(tensor)], tensor.shape[-1]
    if made.numel() != every.numel() * dim or made.shape[-1] != dim:
        return None
    table = made.reshape(-1, dim)[:count].contiguous()
    there = table[positions].view(tensor.shape) if tensor.numel() == positions.numel() * dim else None
    return Looked(table, positions) if there is not None and torch.equal(there, tensor) else None


def _steps_to(tensor: Tensor, makers: dict[int, Step], positions: Tensor) -> list[Step] | None:
    """Return the steps that make a tensor of positions, in order; None if it needs anything else that moves."""
    found: dict[int, Step] = {}

    def visit(each: Tensor) -> bool:
        if each is positions:
            return True
        step = makers.get(id(each))
        if step is None:
            return bool(found) or each is not tensor  # what was there before stays
        if id(step) in found:
            return True
        if not isinstance(step.function, OpOverload) or not isinstance(step.outputs, Tensor):
            return False
        if not all(visit(read) for read in step.reads):
            return False
        found[id(step)] = step
        return True

    return list(found.values()) if visit(tensor) and found else None
