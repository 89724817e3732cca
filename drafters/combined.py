"""The common parts of drafters that are made of others."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import instance
from specdec.batch import Batch
from specdec.interfaces import Description, Drafter, Session, Sizes
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import Outcome


class CombinedDrafter(Drafter):
    """A drafter that proposes nodes of others, its ``parts``.

    All see everything that becomes final. In ``Outcome.path`` a part finds its own nodes, by the numbers that they
    had in the part's own tree, up to the first node that is not its own; -1 stands from there on.
    """

    def __init__(self, **parts: Drafter):
        for name, part in parts.items():
            instance(name, part, Drafter, "a drafter, such as SuffixDrafter()")
        self.parts = tuple(parts.values())
        self.laws = frozenset(law for part in self.parts for law in part.laws)
        self.max_depth = max(part.max_depth for part in self.parts)

    def describe(self, target: Target | None = None) -> Description:
        found = [part.describe(target) for part in self.parts]
        return Description(
            kind=" and ".join(part.kind for part in found), parts=tuple(model for part in found for model in part.parts)
        )

    @abstractmethod
    def bind(self, target: Target, sizes: Sizes) -> "CombinedSession": ...


class CombinedSession(Session):
    """The sessions of some drafters."""

    reads_host = True

    def __init__(self, drafter: CombinedDrafter, *parts: Session):
        self.parts = parts
        self.depths = tuple(part.max_depth for part in drafter.parts)
        self.hidden_layers = tuple(dict.fromkeys(layer for part in parts for layer in part.hidden_layers))
        self.top_tokens = max(part.top_tokens for part in parts)
        self.models = tuple(model for part in parts for model in part.models)
        self.caches = tuple(cache for part in parts for cache in part.caches)
        lookbacks = [part.lookback for part in parts if part.lookback is not None]
        self.lookback = max(lookbacks) if len(lookbacks) == len(parts) else None

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        for part in self.parts:
            part.admit(slot, prompt_ids, sampling)

    def held(self, slot: int, length: int) -> int:
        return min(part.held(slot, length) for part in self.parts)

    def release(self, slot: int) -> None:
        for part in self.parts:
            part.release(slot)

    def ask(self, part: int, batch: Batch) -> DraftTree:
        self.parts[part].prepare(batch)
        return self.parts[part].propose(batch)

    def show(
        self, part: int, outcome: Outcome, *, first: int, width: int | None = None, rows: np.ndarray | None = None
    ) -> None:
        """Let a part observe an outcome, with the numbers that the nodes of the path have in the part's own tree.

        Args:
            first: Where the part's drafted nodes begin in the combination's tree.
            width: How many they are; None for all from there on.
            rows: The rows in which the tree has nodes of the part, Bool[batch]; None for all.
        """
        session, depth = self.parts[part], self.depths[part]
        top = outcome.top_tokens
        if top is not None:
            outcome = replace(outcome, top_tokens=top[..., : session.top_tokens] if session.top_tokens else None)
        if outcome.path is not None and outcome.host is not None and outcome.host.path is not None:
            path, host = outcome.path[:, :depth], outcome.host.path[:, :depth]
            mine, ours = path >= first, host >= first
            if width is not None:
                mine, ours = mine & (path < first + width), ours & (host < first + width)
            if rows is not None:
                mine = mine & torch.from_numpy(rows).to(path.device, non_blocking=True)[:, None]
                ours = ours & rows[:, None]
            shift = first - 1
            host_path = np.where(ours, host - shift, -1)
            outcome = replace(outcome, path=(path - shift).where(mine, -1), host=replace(outcome.host, path=host_path))
        session.observe(outcome)


def wider(table: Tensor, width: int, value: int | bool) -> Tensor:
    """Return a table of nodes with more columns, filled with one value."""
    return torch.nn.functional.pad(table, (0, width - table.shape[1]), value=value)
