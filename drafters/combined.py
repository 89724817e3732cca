"""What drafters that are made of two others have in common."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import instance
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.types import Committed


class CombinedDrafter(Drafter):
    """A drafter that proposes nodes of two others.

    Both see everything that becomes final. In ``Committed.path`` a part finds its own nodes, by the numbers that they
    had in the part's own tree, up to the first node that is not its own; -1 stands from there on.

    Args:
        parts: The two drafters, by the names of the arguments that they were given for.

    Raises:
        ValueError: One is no drafter, or both are the same object.
    """

    def __init__(self, **parts: Drafter):
        for name, part in parts.items():
            instance(name, part, Drafter, "a drafter, such as SuffixDrafter()")
        self.parts = tuple(parts.values())
        first, second = self.parts
        if first is second:
            raise ValueError(f"{' and '.join(parts)} are one and the same drafter: make two, each has its own state")
        self.laws = first.laws | second.laws
        self.hidden_layers = tuple(dict.fromkeys((*first.hidden_layers, *second.hidden_layers)))
        self.top_tokens = max(first.top_tokens, second.top_tokens)
        self.max_depth = max(first.max_depth, second.max_depth)

    def bind(self, target: Target, *, max_batch_size: int, max_length: int) -> None:
        """Bind both parts."""
        for part in self.parts:
            part.bind(target, max_batch_size=max_batch_size, max_length=max_length)

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Begin the request in both parts."""
        for part in self.parts:
            part.admit(slot, prompt_ids, sampling)

    def release(self, slot: int) -> None:
        """End the request in both parts."""
        for part in self.parts:
            part.release(slot)


def told_to(
    part: Drafter,
    committed: Committed,
    *,
    first: int,
    width: int | None = None,
    rows: np.ndarray | None = None,
) -> Committed:
    """Returns what a part is to see of committed tokens.

    Args:
        part: The part.
        committed: What the combination was told.
        first: Where the part's drafted nodes begin in the combination's tree.
        width: How many they are; None for all from there on.
        rows: The rows in which the tree has nodes of the part, Bool[batch]; None for all.
    """
    top = None if committed.top_tokens is None or not part.top_tokens else committed.top_tokens[..., : part.top_tokens]
    if committed.path is None or committed.host_path is None:
        return replace(committed, top_tokens=top)
    last = None if width is None else first + width
    path, host = committed.path[:, : part.max_depth], committed.host_path[:, : part.max_depth]
    mine, ours = path >= first, host >= first
    if last is not None:
        mine, ours = mine & (path < last), ours & (host < last)
    if rows is not None:
        mine = mine & torch.from_numpy(rows).to(path.device, non_blocking=True)[:, None]
        ours = ours & rows[:, None]
    shift = first - 1
    return replace(
        committed,
        top_tokens=top,
        path=(path - shift).where(mine, -1),
        host_path=np.where(ours, host - shift, -1),
    )


def wider(table: Tensor, width: int, value: int | bool) -> Tensor:
    """Returns a table of nodes with more columns, filled with one value."""
    return torch.nn.functional.pad(table, (0, width - table.shape[1]), value=value)
