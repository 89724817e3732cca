"""Drafters that are made of others: as deep as a policy finds worthwhile, the better of two, or two in one tree."""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec import Batch, DraftSampling, DraftTree, Outcome, SamplingParams, Target
from specdec.arguments import instance, number
from specdec.drafting.lookup import RatedDrafter, RatedSession
from specdec.drafting.policies import LengthPolicy
from specdec.interfaces import Description, Drafter, Session, Sizes


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

    def show(self, part: int, outcome: Outcome, *, first: int, width: int | None = None, rows: Any = None) -> None:
        """Let a part see an outcome by its own tree's numbers; its nodes begin at ``first``, in ``rows`` or in all."""
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


class AdaptiveDrafter(CombinedDrafter):
    """Asks a policy before every round how deep each row's drafts may be, and shows any drafter as much room."""

    adapts = True

    def __init__(self, drafter: Drafter, policy: LengthPolicy):
        super().__init__(drafter=drafter)
        instance("policy", policy, LengthPolicy, "a LengthPolicy, such as AdditiveLength()")
        if policy.foresees:
            raise ValueError(
                f"{type(policy).__name__} decides by what is known after the round: give another policy, or play it in "
                f"virtual time"
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


class ChoiceDrafter(CombinedDrafter):
    """Drafts by look-up in the rows where that promises more accepted tokens than a model has had of late.

    Before a round, the look-up says how many of its tokens it expects to be accepted (``RatedSession.rate``). This is
    multiplied by the request's *trust*, the running mean of accepted over expected tokens in the rounds that took the
    look-up's draft. A row takes the look-up's draft where the product is more than the running mean of accepted tokens
    over the rounds that took the model's. So the choice depends on what was emitted before the round and on nothing
    that is drawn in it, which makes it exact for every rule that takes both parts' drafts. The model drafts only for
    the rows that take its draft.

    Args:
        start: The mean that a request begins with; None for half of the model's longest draft.
        memory: The weight of the last round in the running means. In a round that took the model's draft, trust comes
            back towards 1 with a tenth of this weight, so that a look-up that was wrong once is tried again.
    """

    adapts = True

    def __init__(self, lookup: RatedDrafter, model: Drafter, *, start: float | None = None, memory: float = 0.2):
        instance("lookup", lookup, RatedDrafter, "a drafter that rates its drafts, such as SuffixDrafter()")
        super().__init__(lookup=lookup, model=model)
        self.lookup, self.model = lookup, model
        remedy = "give a number of tokens, at least 0, or None"
        start = model.max_depth / 2 if start is None else start
        self.start = number("start", start, remedy, lambda tokens: 0 <= tokens < float("inf"))
        self.memory = number("memory", memory, "give more than 0 and at most 1", lambda share: 0 < share <= 1)
        self.max_nodes = max(lookup.max_nodes, model.max_nodes)
        self.is_chain = lookup.is_chain and model.is_chain

    def bind(self, target: Target, sizes: Sizes) -> "ChoiceSession":
        return ChoiceSession(self, self.lookup.bind(target, sizes), self.model.bind(target, sizes), sizes)


class ChoiceSession(CombinedSession):
    """The state of a ``ChoiceDrafter`` in one engine: what each request has had of either part."""

    def __init__(self, drafter: ChoiceDrafter, lookup: RatedSession, model: Session, sizes: Sizes):
        super().__init__(drafter, lookup, model)
        self._lookup, self._start, self._memory = lookup, drafter.start, drafter.memory
        rows = sizes.max_batch_size
        self._mean = np.full(rows, self._start)
        self._trust, self._rated = np.ones(rows), np.zeros(rows)
        self._by_model = np.zeros(rows, dtype=bool)

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        super().admit(slot, prompt_ids, sampling)
        self._mean[slot], self._trust[slot] = self._start, 1.0

    def observe(self, outcome: Outcome) -> None:
        host = outcome.host
        assert host is not None, "the engine gives the host's numbers to a session that reads them"
        slots = host.slots
        by_model = self._by_model[slots]
        for part, rows in enumerate((~by_model, by_model)):
            self.show(part, outcome, first=1, rows=None if rows.all() else rows)
        if outcome.path is None:
            return
        accepted, counted = host.counts - 1, host.counts > 0
        mean, trust, rated = self._mean[slots], self._trust[slots], self._rated[slots]
        self._mean[slots] = np.where(by_model & counted, mean + self._memory * (accepted - mean), mean)
        weight = np.where(by_model, self._memory / 10, np.where(rated > 0, self._memory, 0.0)) * counted
        ratio = np.where(by_model, 1.0, accepted / np.maximum(rated, 1e-9))
        self._trust[slots] = trust + weight * (ratio - trust)

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree:
        """Choose for every row, and let each part draft for the rows that it was chosen for."""
        host = batch.on_host
        index, rated = host.slots, self._lookup.rate(batch)
        by_model = host.drafting & (rated * self._trust[index] <= self._mean[index])
        self._rated[index] = rated
        self._by_model[index] = by_model
        if not by_model.any():
            return self.ask(0, batch)
        if by_model[host.drafting].all():
            return self.ask(1, batch)
        rows = np.flatnonzero(by_model)
        return _chosen(self.ask(0, batch), self.ask(1, batch.rows(rows)), rows, batch)


def _chosen(found: DraftTree, drafted: DraftTree, rows: np.ndarray, batch: Batch) -> DraftTree:
    """Return one batch of trees from two: the second's in some rows."""
    width, index = max(found.width, drafted.width), torch.from_numpy(rows).to(batch.device, non_blocking=True)
    bounds = {name: max(getattr(found, name), getattr(drafted, name)) for name in ("max_depth", "max_children")}
    one, other = (tree.padded(width, **bounds) for tree in (found, drafted))
    q = other.draft_probs
    return DraftTree.build(
        one.tokens.index_copy(0, index, other.tokens),
        one.parents.index_copy(0, index, other.parents),
        valid=one.valid.index_copy(0, index, other.valid),
        sampling=one.law.index_copy(0, index, other.law),
        draft_probs=None if q is None else q.new_zeros(len(batch), *q.shape[1:]).index_copy_(0, index, q),
        **bounds,
    )


class MergedDrafter(CombinedDrafter):
    """Drafts the nodes of a model and those of a look-up in one tree.

    Among the children of a node the model's come first, in the order in which they were drawn, and the look-up's
    follow: a rule then tries the drawn tokens against the whole of p (Hu et al. 2025, arXiv 2502.18779). Where a node
    of the model and one of the look-up have the same token and parent, the look-up's is left out, and what it drafts
    behind it goes on behind the model's. That is exact, as a later sibling or a deeper node may depend on what was
    drawn before it. To leave out the drawn node instead would not be.
    """

    def __init__(self, lookup: Drafter, model: Drafter):
        super().__init__(lookup=lookup, model=model)
        self.model, self.lookup = model, lookup
        if lookup.laws != {DraftSampling.DETERMINISTIC}:
            laws = " or ".join(law.name for law in sorted(lookup.laws))
            raise ValueError(
                f"lookup={type(lookup).__name__} draws its drafts {laws}: give a drafter that chooses them without "
                f"randomness (DETERMINISTIC), such as SuffixDrafter, and the other one as model"
            )
        self.adapts = model.adapts or lookup.adapts
        self.max_nodes = model.max_nodes + lookup.max_nodes
        self.is_chain = False

    def bind(self, target: Target, sizes: Sizes) -> "MergedSession":
        return MergedSession(self, self.lookup.bind(target, sizes), self.model.bind(target, sizes))


class MergedSession(CombinedSession):
    """The sessions of a look-up and a model whose nodes stand in one tree."""

    def __init__(self, drafter: MergedDrafter, lookup: Session, model: Session):
        super().__init__(drafter, lookup, model)
        self._nowhere = drafter.max_nodes + 1
        self._width = 1  # of the model's trees in the last round

    def observe(self, outcome: Outcome) -> None:
        self.show(1, outcome, first=1, width=self._width - 1)
        # What the look-up is shown never depends on which of its nodes the model has drafted, too. It finds its own
        # nodes where they were in its own tree, and the model's behind them.
        self.show(0, _turned(outcome, self._width - 1), first=self._nowhere)

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree:
        drafted, found = self.ask(1, batch), self.ask(0, batch)
        self._width = drafted.width
        if found.width == 1:
            return drafted
        if drafted.width == 1 and drafted.draft_probs is None:
            return found
        return merged(drafted, found)


def _turned(outcome: Outcome, drafted: int) -> Outcome:
    """Returns an outcome whose first ``drafted`` nodes behind the root stand at the end."""
    nodes, valid, said = outcome.node_tokens, outcome.node_valid, outcome.top_tokens
    if nodes is None or valid is None or said is None:
        return outcome

    def turned(each: Tensor) -> Tensor:  # without an index, which would be a copy to the device
        return torch.cat([each[:, :1], each[:, 1 + drafted :], each[:, 1 : 1 + drafted]], dim=1)

    return replace(outcome, node_tokens=turned(nodes), node_valid=turned(valid), top_tokens=turned(said))


def merged(first: DraftTree, second: DraftTree) -> DraftTree:
    """Returns the nodes of two batches of trees in one batch, the first's under their own numbers.

    The nodes ``5 7`` of a first tree, in line below the root 4, and the nodes ``5 8`` and ``6`` of a second become
    ``4 5 7 5 8 6`` with the parents ``-1 0 1 0 1 0``. Node 3 would repeat node 1, so it is invalid, and node 4, which
    followed it, goes on behind node 1. All of the second's nodes are ``DETERMINISTIC``.
    """
    place, repeats = _places(first, second)
    parents = place.gather(1, second.parents[:, 1:])
    width = first.width
    law = torch.cat([first.law, second.law[:, 1:]], dim=1)
    q = first.draft_probs
    return DraftTree.build(
        torch.cat([first.tokens, second.tokens[:, 1:]], dim=1),
        torch.cat([first.parents, parents], dim=1),
        valid=torch.cat([first.valid, second.valid[:, 1:] & ~repeats], dim=1),
        sampling=DraftSampling.DETERMINISTIC if first.only_law is DraftSampling.DETERMINISTIC else law,
        # The look-up's nodes have no drawn children, and nobody reads their q.
        draft_probs=None if q is None else torch.nn.functional.pad(q, (0, 0, 0, second.width - 1)),
        max_depth=max(first.max_depth, second.max_depth),
        max_children=min(first.max_children + second.max_children, width + second.width - 2),
    )


def _places(first: DraftTree, second: DraftTree) -> tuple[Int[Tensor, "batch node"], Bool[Tensor, "batch drafted"]]:
    """Returns behind which node of the merged tree the children of each node of the second tree go, root included."""
    batch = len(first.tokens)
    place = torch.arange(first.width - 1, first.width + second.width - 1, device=first.tokens.device)
    place = place.repeat(batch, 1)
    place[:, 0].fill_(0)
    repeats = torch.zeros_like(second.valid)
    above = second.parents.clamp(min=0)
    same = (second.tokens[:, :, None] == first.tokens[:, None, :]) & first.valid[:, None] & second.valid[:, :, None]
    same[:, :, 0].fill_(False)
    for depth in range(1, min(first.max_depth, second.max_depth) + 1):
        under = first.parents[:, None, :] == place.gather(1, above)[:, :, None]
        twin = same & under & (second.depth == depth)[:, :, None]
        found, node = twin.max(dim=-1)
        place = node.where(found, place)
        repeats |= found
    return place, repeats[:, 1:]
