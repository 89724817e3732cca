"""The common parts of drafters that are made of others, and one whose drafts a length policy limits."""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import instance
from specdec.batch import Batch
from specdec.drafting.policies import LengthPolicy
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

        Its drafted nodes begin at ``first`` in the combination's tree, in these ``rows``, Bool[batch]; None is for all.
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


class AdaptiveDrafter(CombinedDrafter):
    """Asks a policy before every round how deep each row's drafts may be, and another drafter for the drafts.

    The drafter is shown a batch as if the output had room for no deeper drafts, so any drafter will do.
    """

    adapts = True

    def __init__(self, drafter: Drafter, policy: LengthPolicy):
        super().__init__(drafter=drafter)
        instance("policy", policy, LengthPolicy, "a LengthPolicy, such as AdditiveLength()")
        if policy.foresees is not None:
            raise ValueError(
                f"{type(policy).__name__} decides by what is known after the round ({policy.foresees}): give another "
                f"policy, or play it in virtual time"
            )
        self.drafter, self.policy = drafter, policy
        self.max_nodes, self.is_chain = drafter.max_nodes, drafter.is_chain
        self.is_paths = drafter.is_paths  # a row's paths are cut at one depth
        self.has_leaf_probs = drafter.has_leaf_probs

    def describe(self, target: Target | None = None) -> Description:
        return self.drafter.describe(target)

    def bind(self, target: Target, sizes: Sizes) -> "AdaptiveSession":
        return AdaptiveSession(self, self.drafter.bind(target, sizes), sizes)


class AdaptiveSession(CombinedSession):
    """A session whose drafts a policy limits."""

    def __init__(self, drafter: AdaptiveDrafter, session: Session, sizes: Sizes):
        super().__init__(drafter, session)
        self.policy = copy.copy(drafter.policy)
        self.policy.bind(max_batch_size=sizes.max_batch_size, max_depth=drafter.max_depth)

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self.policy.admit(slot)
        super().admit(slot, prompt_ids, sampling)

    def observe(self, outcome: Outcome) -> None:
        self.parts[0].observe(outcome)
        host = outcome.host
        if host is not None and host.proposed_depth is not None:
            rows = host.counts > 0
            self.policy.note(host.slots[rows], host.proposed_depth[rows], host.counts[rows] - 1)

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree:
        host = batch.on_host
        wanted = self.policy.depths(host.slots, host.lengths)
        room = np.where(host.drafting, np.minimum(wanted, host.max_depth), 0)
        shown = batch.limited(room)
        tree = self.ask(0, shown)
        return tree.limited(shown.max_depth) if (room < tree.max_depth).any() else tree
