"""The better of two drafters, in every row and round: a look-up where it promises more, else a model."""

from collections.abc import Sequence

import numpy as np
import torch

from drafters.combined import CombinedDrafter, CombinedSession, wider
from specdec.arguments import instance, number
from specdec.batch import Batch
from specdec.drafting.lookup import RatedDrafter, RatedSession
from specdec.interfaces import Drafter, Session, Sizes
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import Outcome


class ChoiceDrafter(CombinedDrafter):
    """Drafts by look-up in the rows where that promises more accepted tokens than a model has had of late.

    Before a round, the look-up says how many of its tokens it expects to be accepted (``RatedSession.rate``). This is
    multiplied by the request's *trust*, the running mean of accepted over expected tokens in the rounds that took the
    look-up's draft. A row takes the look-up's draft where the product is more than the running mean of accepted tokens
    over the rounds that took the model's. So the choice depends on what was emitted before the round and on nothing
    that is drawn in it, which makes it exact for every rule that takes both parts' drafts. The model drafts only for
    the rows that take its draft.

    Args:
        lookup: A drafter that rates its drafts, such as ``SuffixDrafter``.
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
        return _merged(self.ask(0, batch), self.ask(1, batch.rows(rows)), rows, batch)


def _merged(found: DraftTree, drafted: DraftTree, rows: np.ndarray, batch: Batch) -> DraftTree:
    """Return one batch of trees from two: the second's in some rows."""
    width = max(found.width, drafted.width)
    index = torch.from_numpy(rows).to(batch.device, non_blocking=True)

    def both(one: torch.Tensor, other: torch.Tensor, padding: int | bool) -> torch.Tensor:
        return wider(one, width, padding).index_copy(0, index, wider(other, width, padding))

    tokens = both(found.tokens, drafted.tokens, -1)
    q = None
    if drafted.draft_probs is not None:
        q = drafted.draft_probs.new_zeros(len(batch), width, drafted.draft_probs.shape[2])
        q[index, : drafted.width] = drafted.draft_probs
    return DraftTree.build(
        tokens.where(tokens >= 0, batch.roots[:, None]),
        both(found.parents, drafted.parents, 0),
        valid=both(found.valid, drafted.valid, False),
        sampling=both(found.law, drafted.law, 0),
        draft_probs=q,
        max_depth=max(found.max_depth, drafted.max_depth),
        max_children=max(found.max_children, drafted.max_children),
    )
