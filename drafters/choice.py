"""The better of two drafters, in every row and round: a look-up where it promises more, else a model."""

from collections.abc import Sequence

import numpy as np
import torch

from drafters.combined import CombinedDrafter, told_to, wider
from specdec.arguments import instance, number
from specdec.batch import Batch
from specdec.drafting.rated import RatedDrafter
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import Committed


class ChoiceDrafter(CombinedDrafter):
    """Drafts by look-up in the rows where that promises more accepted tokens than a model has had of late.

    Before a round, the look-up says how many of its tokens it expects to be accepted (``RatedDrafter.rate``). This is
    multiplied by the request's *trust*, the running mean of accepted over expected tokens in the rounds that took the
    look-up's draft: at a temperature fewer are accepted than a look-up expects. A row takes the look-up's draft where
    the product is more than the running mean of accepted tokens over the rounds that took the model's; elsewhere it
    takes the model's. So the choice depends on what was emitted before the round and on nothing that is drawn in it,
    which makes it exact for every rule that takes both parts' drafts.

    The model drafts only for the rows that take its draft: in a round that takes none it costs nothing. What it has
    missed it is shown before its next draft.

    Args:
        lookup: A drafter that rates its drafts, such as ``SuffixDrafter``.
        model: Any other drafter.
        start: The mean that a request begins with; None for half of the model's longest draft.
        memory: The weight of the last round in the running means. In a round that took the model's draft, trust comes
            back towards 1 with a tenth of this weight, so that a look-up that was wrong once is tried again.

    Raises:
        ValueError: A part is no such drafter, or a number is out of its range.
    """

    adapts = True

    def __init__(self, lookup: RatedDrafter, model: Drafter, *, start: float | None = None, memory: float = 0.2):
        instance("lookup", lookup, RatedDrafter, "a drafter that rates its drafts, such as SuffixDrafter()")
        super().__init__(lookup=lookup, model=model)
        self.lookup, self.model = lookup, model
        self.start = model.max_depth / 2 if start is None else number("start", start)
        if not 0 <= self.start < float("inf"):
            raise ValueError(f"start={start}: give a number of tokens, at least 0, or None")
        self.memory = number("memory", memory)
        if not 0 < self.memory <= 1:
            raise ValueError(f"memory={memory}: give more than 0 and at most 1")
        self.max_nodes = max(lookup.max_nodes, model.max_nodes)
        self.is_chain = lookup.is_chain and model.is_chain

    def bind(self, target: Target, *, max_batch_size: int, max_length: int) -> None:
        """Bind both, and begin with nothing known."""
        super().bind(target, max_batch_size=max_batch_size, max_length=max_length)
        self._mean = np.full(max_batch_size, self.start)
        self._trust, self._rated = np.ones(max_batch_size), np.zeros(max_batch_size)
        self._by_model = np.zeros(max_batch_size, dtype=bool)

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Begin with the mean that all requests begin with."""
        super().admit(slot, prompt_ids, sampling)
        self._mean[slot], self._trust[slot] = self.start, 1.0

    def observe(self, committed: Committed) -> None:
        """Show both what became final, and note how many tokens were accepted of the part that drafted."""
        slots = committed.host_slots
        by_model = self._by_model[slots]
        for part, rows in ((self.lookup, ~by_model), (self.model, by_model)):
            part.observe(told_to(part, committed, first=1, rows=None if rows.all() else rows))
        if committed.path is not None:
            accepted = committed.counts - 1
            mean, trust, rated = self._mean[slots], self._trust[slots], self._rated[slots]
            self._mean[slots] = np.where(by_model, mean + self.memory * (accepted - mean), mean)
            weight = np.where(by_model, self.memory / 10, np.where(rated > 0, self.memory, 0.0))
            ratio = np.where(by_model, 1.0, accepted / np.maximum(rated, 1e-9))
            self._trust[slots] = trust + weight * (ratio - trust)

    @torch.inference_mode()
    def propose(self, slots: Batch) -> DraftTree:
        """Choose for every row, and let each part draft for the rows that it was chosen for."""
        index, rated = slots.host_index, self.lookup.rate(slots)
        by_model = slots.host_drafting & (rated * self._trust[index] <= self._mean[index])
        self._rated[index] = rated
        self._by_model[index] = by_model
        if not by_model.any():
            return self.lookup.propose(slots)
        if by_model[slots.host_drafting].all():
            return self.model.propose(slots)
        rows = np.flatnonzero(by_model)
        return _merged(self.lookup.propose(slots), self.model.propose(slots.rows(rows)), rows, slots)


def _merged(found: DraftTree, drafted: DraftTree, rows: np.ndarray, slots: Batch) -> DraftTree:
    """Returns one batch of trees from two.

    Args:
        found: The look-up's trees, for all rows.
        drafted: The model's, for some rows.
        rows: Which rows these are.
        slots: All rows.
    """
    width = max(found.width, drafted.width)
    index = torch.from_numpy(rows).to(slots.device, non_blocking=True)

    def both(one: torch.Tensor, other: torch.Tensor, padding: int | bool) -> torch.Tensor:
        return wider(one, width, padding).index_copy(0, index, wider(other, width, padding))

    valid = both(found.valid, drafted.valid, False)
    tokens = both(found.tokens, drafted.tokens, 0).where(valid, slots.roots[:, None])
    q = None
    if drafted.draft_probs is not None:
        q = drafted.draft_probs.new_zeros(len(slots), width, drafted.draft_probs.shape[2])
        q[index, : drafted.width] = drafted.draft_probs
    return DraftTree.build(
        tokens,
        both(found.parents, drafted.parents, 0),
        valid=valid,
        sampling=both(found.law, drafted.law, 0),
        draft_probs=q,
        max_depth=max(found.max_depth, drafted.max_depth),
        max_children=max(found.max_children, drafted.max_children),
    )
