"""A causal LM of another vocabulary as a scorer: its context is the text so far, in tokens of its own."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.model_scorer import LAST
from specdec.drafting.scorer import Follower, Logits, forward_of
from specdec.forward import ForwardBatch, Wants
from specdec.target.runner import ModelRunner
from specdec.target.spelling import Retokenized, Spelling
from specdec.topology import Topology


class RetokenizedScorer(Follower):
    """Scores with a model that has another tokenizer than the target.

    Before a tree is grown, the text of a row is read in the model's tokens. The cache keeps the common beginning with
    the last round's; the rest is forwarded with the last token. Texts longer than the cache are read from a later place
    on. Its session must say ``reads_host``.

    Args:
        source: Spells the target's tokens.
        own: Spells the model's.
        max_tokens: The most tokens of a text in the model's cache.
        width: The number of a text's last tokens that are forwarded in every round.
        to_model: The model's token for every token that ``level_logits`` is given; None if these are its own.
        columns: The columns of the model's logits that count, in order; None for all.
    """

    lookback = 0

    def __init__(
        self,
        runner: ModelRunner,
        source: Spelling,
        own: Spelling,
        *,
        max_batch_size: int,
        max_tokens: int,
        width: int,
        to_model: Int[Tensor, " vocab"] | None = None,
        columns: Int[Tensor, " column"] | None = None,
    ):
        if runner.cache.states is not None:
            raise ValueError(
                f"{runner.facts.model_type} has recurrent layers, whose states cannot go back to where a text is read "
                f"in other tokens than before: draft with a model of attention alone"
            )
        super().__init__(runner)
        self.caches = ()
        self._spellings, self._most, self._width = (source, own), max_tokens, width
        self._to_model, self._columns = to_model, columns
        self.texts = [Retokenized(source, own) for _ in range(max_batch_size)]
        # The text of every slot in the model's tokens, and the tokens that its cache holds.
        self._wanted: list[Sequence[int]] = [[0]] * max_batch_size
        self._held: list[Sequence[int]] = [[]] * max_batch_size
        self._tokens = self._roots = torch.empty(0, dtype=torch.long)
        self._bound = 0

    def admit(self, slot: int, length: int = 0) -> None:
        self.texts[slot] = Retokenized(*self._spellings)
        self._wanted[slot], self._held[slot] = [0], []

    def prepare(self, batch: Batch) -> Hashable:
        """Read the texts, and forward what the cache lacks of long ones."""
        host = batch.on_host
        for row in np.flatnonzero(host.drafting & (host.max_depth > 0)).tolist():
            slot = int(host.slots[row])
            read = self.texts[slot].read(host.tokens[row, : host.lengths[row] + 1].tolist()) or [0]
            over = len(read) - self._most
            step = max(self._most // 2, 1)
            self._wanted[slot] = read[-(-over // step) * step :] if over > 0 else read
        slots = host.slots.tolist()
        wanted = [self._wanted[slot] for slot in slots]
        known = np.array([_common(self._held[slot], ids) for slot, ids in zip(slots, wanted, strict=True)])
        lengths = np.array([len(ids) for ids in wanted])
        # Every round forwards equally many tokens, some of them again, so that its forward can be captured.
        width = self._width if lengths.min() >= self._width else 1
        missing = lengths - width - known
        behind = np.flatnonzero(missing > 0)
        if len(behind):
            tokens = np.zeros((len(behind), int(missing.max())), dtype=np.int64)
            for place, row in enumerate(behind.tolist()):
                tokens[place, : missing[row]] = wanted[row][known[row] : -width]
            chunk = ForwardBatch.of_chunk(
                torch.from_numpy(tokens).to(self.runner.device),
                host_slots=host.slots[behind],
                host_lengths=known[behind],
                host_counts=missing[behind],
            )
            self.runner.run(chunk)
        for slot, ids in zip(slots, wanted, strict=True):
            self._held[slot] = ids[:-width]
        packed = np.array([[len(ids) - 1, *ids[-width:]] for ids in wanted])
        on_device = torch.from_numpy(packed).to(self.runner.device, non_blocking=True)
        self._roots, self._tokens = on_device[:, 0].contiguous(), on_device[:, 1:].contiguous()
        self._bound = int(lengths.max())
        return self.runner.version

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        for slot in batch.on_host.slots.tolist():
            self._held[slot] = self._wanted[slot]
        width = self._tokens.shape[1]
        topology = Topology.chain(width, batch.device)
        return self._scores(batch, self._tokens, topology, self._roots + 1 - width, width, wants=LAST)

    def level_logits(self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int) -> Logits:
        own = tokens if self._to_model is None else self._to_model[tokens]
        return self._scores(batch, own, topology, self._roots, topology.width)

    def _scores(
        self, batch: Batch, tokens: Tensor, topology: Topology, lengths: Tensor, nodes: int, **wants: Wants
    ) -> Tensor:
        bound = self._bound + nodes
        scores = self.runner.run(forward_of(batch, tokens, topology, lengths, key_bound=bound, **wants)).scores
        return scores if self._columns is None else scores.index_select(-1, self._columns)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count
    return int(np.argmin(np.equal(one[:count], other[:count])))
