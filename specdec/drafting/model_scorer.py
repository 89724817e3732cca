"""A causal LM as a scorer, with a KV cache of its own, which follows the target's sequences."""

from collections.abc import Callable, Hashable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.scorer import Scorer
from specdec.forward import LOGITS, ForwardBatch, Wants
from specdec.target.runner import ModelRunner
from specdec.topology import Topology
from specdec.types import Committed, Decided

_LAST = Wants(logits=1)


class ModelScorer(Scorer):
    """Scores with a model whose cache is kept in step with what the target has committed.

    It keeps, for every slot, the position up to which keys and values are right. The last committed token may be
    missing, because it was a leaf of the tree and never forwarded; ``root_logits`` forwards it together with the root.
    More is missing after rounds without a draft; ``catch_up`` forwards that.

    Args:
        runner: The drafting model.
        max_batch_size: The number of slots.
        to_model: Turns the target's token ids into the model's.
    """

    def __init__(
        self, runner: ModelRunner, *, max_batch_size: int, to_model: Callable[[Tensor], Tensor] = lambda tokens: tokens
    ):
        self.runner = runner
        self._to_model = to_model
        self._known = np.zeros(max_batch_size, dtype=np.int64)
        with torch.inference_mode(False):
            self._last_token = torch.zeros(max_batch_size, dtype=torch.long, device=runner.device)
        self._pair = Topology.chain(2, runner.device)

    def admit(self, slot: int) -> None:
        """Begin with an empty row."""
        self._known[slot] = 0

    def release(self, slot: int) -> None:
        """Forget a row. Its entries are cleared, because they may be NaN."""
        cache = self.runner.cache
        nodes = cache.positions - cache.max_length
        cache.clear(slot, stop=int(self._known[slot]) + 1 + nodes)

    @property
    def version(self) -> Hashable:
        """The model's."""
        return self.runner.version

    def observe(self, committed: Committed, nodes: Int[Tensor, "batch depth"] | None, *, in_place: bool) -> None:
        """Prefill pieces of prompts; commit an accepted path."""
        counts = torch.from_numpy(committed.counts).to(self.runner.device, non_blocking=True)
        last = committed.tokens.gather(1, counts[:, None] - 1)[:, 0]
        slots, starts = committed.host_slots, committed.starts
        known = self._known[slots]
        if nodes is None:
            ready = known == starts
            if ready.any():
                self._prefill(committed if ready.all() else committed.rows(np.flatnonzero(ready)))
        else:
            if not in_place:
                lengths = torch.from_numpy(starts).to(self.runner.device, non_blocking=True)
                self.runner.cache.commit(committed.slots, lengths, nodes)
            # All but the last node had children, so they were forwarded. Behind the scorer's own nodes, the path may go
            # on with another drafter's, which it was not shown.
            path = committed.host_path
            shown = committed.counts - 1 if path is None else (path >= 0).cumprod(1).sum(1)
            self._known[slots] = np.where(known >= starts, starts + shown, known)
        self._last_token[committed.slots] = last

    def _prefill(self, committed: Committed) -> None:
        tokens = self._to_model(committed.tokens)
        self.runner.run(ForwardBatch.of_chunk(tokens, host_slots=committed.host_slots, host_lengths=committed.starts))
        self._known[committed.host_slots] += committed.counts

    def catch_up(self, slots: Batch) -> None:
        """Prefill what was committed while nothing was to be drafted."""
        missing = np.where(slots.host_drafting, slots.host_lengths - self._known[slots.host_index], 0)
        rows = np.flatnonzero(missing > 1)
        if not len(rows):
            return
        host_slots, missing = slots.host_index[rows], missing[rows]
        starts = self._known[host_slots]
        index = np.minimum(starts[:, None] + np.arange(int(missing.max())), slots.host_tokens.shape[1] - 1)
        tokens = torch.from_numpy(np.take_along_axis(slots.host_tokens[rows], index, axis=1).astype(np.int64))
        tokens = self._to_model(tokens.to(self.runner.device))
        self.runner.run(ForwardBatch.of_chunk(tokens, host_slots=host_slots, host_lengths=starts))
        self._known[host_slots] += missing

    def root_logits(self, slots: Batch) -> Float[Tensor, "batch 1 vocab"]:
        """Returns logits at the root, after forwarding the last committed token again."""
        recorded = slots.key_bound is not None
        before = None if recorded else slots.host_lengths > 0
        every = before is not None and bool(before.all())  # as nearly always: a prompt of one token has nothing there
        lengths, last = slots.lengths, self._last_token[slots.index]
        if every:
            lengths = lengths - 1
        else:
            again = lengths > 0
            lengths, last = lengths - again.long(), torch.where(again, last, slots.roots)
        output = self.runner.run(
            ForwardBatch(
                tokens=self._to_model(torch.stack([last, slots.roots], dim=1)),
                slots=slots.index,
                lengths=lengths,
                topology=self._pair,
                key_bound=slots.key_bound,
                wants=_LAST if every else LOGITS,
            )
        )
        if not recorded:
            self._known[slots.host_index] = slots.host_lengths
        if every:
            return output.scores
        return output.scores.gather(1, again.long()[:, None, None].expand(-1, 1, output.scores.shape[2]))

    def level_logits(
        self, slots: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int
    ) -> Float[Tensor, "batch node vocab"]:
        """Returns logits at the next nodes of a tree, whose nodes above are in the cache."""
        output = self.runner.run(
            ForwardBatch(
                tokens=self._to_model(tokens),
                slots=slots.index,
                lengths=slots.lengths,
                topology=topology,
                key_bound=slots.key_bound,
            )
        )
        return output.scores

    def follow(self, decided: Decided, nodes: Int[Tensor, "batch depth"], *, in_place: bool) -> None:
        """Commit an accepted path on the device."""
        if not in_place:
            self.runner.cache.commit(decided.slots, decided.lengths, nodes)
        last = decided.tokens.gather(1, decided.counts[:, None] - 1)[:, 0]
        self._last_token[decided.slots] = last.where(decided.told, self._last_token[decided.slots])

    def followed(self, slots: Batch, counts: np.ndarray, told: np.ndarray) -> None:
        """Note on the host what a recorded round has put into the cache."""
        # All but the last committed token had children, so they were forwarded.
        self._known[slots.host_index] = slots.host_lengths + np.where(told, counts - 1, 0)
