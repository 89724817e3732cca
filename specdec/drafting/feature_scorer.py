"""A head that reads pairs (the target's hidden state at t, token t+1) as a scorer: EAGLE's heads, MTP modules.

Where they stand: the pair of position t stands at position t of the head's own KV cache. With L committed tokens, the
newest complete pair is (state at L-1, root). It stands at L-1 and is node 0 of the tree that is grown. A drafted node's
pair is (its parent's output, its token). Nothing of a tree is committed: the pairs of accepted tokens are forwarded
again, with the target's hidden states in place of the head's own outputs.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.scorer import Scorer
from specdec.forward import ForwardBatch, Wants, slot_index
from specdec.target.runner import ModelRunner
from specdec.topology import Topology
from specdec.types import Committed, Decided

Fuse = Callable[[list[Tensor]], Tensor]
"""Makes the head's features, ``[batch, position, width]``, of the target's hidden states, one tensor per layer."""


class FeatureScorer(Scorer):
    """Scores with a head whose cache holds one entry per pair.

    Each slot keeps its last ``window`` pairs, at addresses that stay. ``root_logits`` forwards all of them, so that the
    forward has one size whatever was accepted: the pairs that are new since the last tree, and before them some whose
    entries are written once more. A round makes at most as many new pairs as the window holds; pairs of prompts are
    forwarded when they are observed.

    Args:
        runner: The head. Its forward takes ``features`` and can return what is fed back.
        max_batch_size: The number of slots.
        window: The most pairs that a round can add: one more than the trees' depth.
        max_shown: The most nodes that are shown to it in one tree, the root not counted.
        width: The width of a feature.
        layers: The hidden states of the target that a feature is made of.
        fuse: Makes features of them.
        fed_back: Which of the head's hidden states is the feature of a node's children.
        to_head: Turns the target's token ids into those that the head embeds.
        fuse_version: Tells when ``fuse`` has changed.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_batch_size: int,
        window: int,
        max_shown: int,
        width: int,
        layers: Sequence[int],
        fuse: Fuse,
        fed_back: int,
        to_head: Callable[[Tensor], Tensor] = lambda tokens: tokens,
        fuse_version: Callable[[], Hashable] = lambda: None,
    ):
        self.runner = runner
        self._window, self._max_shown = window, max_shown
        self._layers, self._fuse, self._to_head = tuple(layers), fuse, to_head
        self._fuse_version, self._fed_back = fuse_version, fed_back
        device, dtype = runner.device, runner.facts.dtype
        self._pairs = np.zeros(max_batch_size, dtype=np.int64)  # pairs that were observed
        self._known = np.zeros(max_batch_size, dtype=np.int64)  # pairs whose entries are in the cache
        self._every = False  # whether every row that drafts has a full window
        with torch.inference_mode(False):
            self._features = torch.zeros(max_batch_size, window, width, dtype=dtype, device=device)
            self._tokens = torch.zeros(max_batch_size, window, dtype=torch.long, device=device)
            self._cells = torch.arange(window, device=device)
        self._chain = Topology.chain(window, device)
        self._outputs = self._features[:0, :1]  # of the tree that is grown, by node

    @property
    def version(self) -> Hashable:
        """The head's."""
        return self.runner.version, self._fuse_version()

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The windows and the cache."""
        return [self._features, self._tokens, *self.runner.cache.tensors]

    def admit(self, slot: int) -> None:
        """Begin without a pair."""
        self._pairs[slot] = self._known[slot] = 0

    def release(self, slot: int) -> None:
        """Forget a row. Its entries are cleared, because they may be NaN."""
        cache = self.runner.cache
        nodes = cache.positions - cache.max_length
        # A round that was played ahead may have written further on.
        cache.clear(slot, stop=int(self._pairs[slot]) + 2 * self._window + nodes)
        self._features[slot] = 0

    # ---------------------------------------------------------------- what becomes final

    def observe(self, committed: Committed, nodes: Int[Tensor, "batch depth"] | None, *, in_place: bool) -> None:
        """Forward the pairs of a piece of a prompt; keep those of a round.

        A round of more pairs than the window holds, whose drafts were another drafter's, is taken in pieces.
        """
        device = self.runner.device
        counts = torch.from_numpy(committed.counts).to(device, non_blocking=True)
        features = self._features_of(committed.hidden_states)
        tokens = _following(committed.tokens, counts, committed.next_tokens)
        slots, ends = committed.host_slots, committed.starts + committed.counts
        if nodes is None:
            self._forward(tokens, features, slots, committed.starts)
            self._push(committed.slots, features, tokens, counts)
            self._known[slots] = self._pairs[slots] = ends
            return
        for first in range(0, int(committed.counts.max()), self._window):
            piece = slice(first, first + self._window)
            new = np.clip(committed.counts - first, 0, self._window)
            late = slots[self._pairs[slots] + new - self._known[slots] > self._window]
            if len(late):
                self._flush(late)
            have = (counts - first).clamp(0, self._window)
            self._push(committed.slots, features[:, piece], tokens[:, piece], have)
            self._pairs[slots] += new

    def follow(self, decided: Decided, nodes: Int[Tensor, "batch depth"], *, in_place: bool) -> None:
        """Keep the pairs of a round, on the device."""
        tokens = _following(decided.tokens, decided.counts, decided.next_tokens)
        self._push(decided.slots, self._features_of(decided.hidden_states), tokens, decided.counts * decided.told)

    def followed(self, slots: Batch, counts: Int[np.ndarray, " batch"], told: Bool[np.ndarray, " batch"]) -> None:
        """Note on the host what a recorded round has drafted and kept."""
        self._known[slots.host_index] = slots.host_lengths
        self._pairs[slots.host_index] = slots.host_lengths + np.where(told, counts, 0)

    def _features_of(self, states: Mapping[int, Tensor]) -> Float[Tensor, "batch position width"]:
        return self._fuse([states[layer] for layer in self._layers]).to(self._features.dtype)

    def _push(
        self,
        slots: Int[Tensor, " batch"],
        features: Float[Tensor, "batch position width"],
        tokens: Int[Tensor, "batch position"],
        counts: Int[Tensor, " batch"],
    ) -> None:
        """Put the first ``counts`` pairs of every row behind those in its window, whose oldest ones drop out."""
        index = counts[:, None] + self._cells
        tokens = torch.cat([self._tokens[slots], tokens], dim=1)
        features = torch.cat([self._features[slots], features], dim=1)
        self._tokens[slots] = tokens.gather(1, index)
        self._features[slots] = _take(features, index)

    def _flush(self, host_slots: np.ndarray) -> None:
        """Forward the pairs that wait in the windows of some slots, which have no room for more."""
        waiting = self._pairs[host_slots] - self._known[host_slots]
        slots = slot_index(host_slots, self.runner.device)
        first = self._window - torch.from_numpy(waiting).to(slots.device, non_blocking=True)
        index = (first[:, None] + self._cells).clamp_(max=self._window - 1)  # padded with the last pair
        tokens, features = self._tokens[slots].gather(1, index), _take(self._features[slots], index)
        self._forward(tokens, features, host_slots, self._known[host_slots])
        self._known[host_slots] = self._pairs[host_slots]

    def _forward(
        self,
        tokens: Int[Tensor, "batch position"],
        features: Float[Tensor, "batch position width"],
        host_slots: np.ndarray,
        starts: np.ndarray,
    ) -> None:
        """Put pairs into the cache. Padding is written behind them; later pairs overwrite it before it is read."""
        device = self.runner.device
        self.runner.run(
            ForwardBatch(
                tokens=self._to_head(tokens),
                features=features,
                slots=slot_index(host_slots, device),
                lengths=torch.from_numpy(starts).to(device, non_blocking=True),
                topology=Topology.chain(tokens.shape[1], device),
                wants=Wants(logits=0),
            )
        )

    # ---------------------------------------------------------------- a tree

    def catch_up(self, slots: Batch) -> Hashable:
        """See whether every row that drafts has a full window; no pair can be missing."""
        self._every = bool((slots.host_lengths[slots.host_drafting] >= self._window).all())
        return self._every

    def ready(self, slots: Batch) -> Bool[Tensor, " batch"] | None:
        """Returns which rows have a pair: those that are longer than one token."""
        return None if self._every else slots.lengths > 0

    def root_logits(self, slots: Batch) -> Float[Tensor, "batch 1 vocab"]:
        """Returns logits after the newest pair, from a forward of the window's pairs."""
        recorded = slots.key_bound is not None
        tokens, features = self._tokens[slots.index], self._features[slots.index]
        lengths, have = slots.lengths, None
        if not self._every:
            # Shorter rows begin at position 0, with what there is; what follows their last pair is never read.
            have = lengths.clamp(max=self._window)
            index = (self._window - have[:, None] + self._cells).clamp_(max=self._window - 1)
            tokens, features = tokens.gather(1, index), _take(features, index)
        output = self.runner.run(
            ForwardBatch(
                tokens=self._to_head(tokens),
                features=features,
                slots=slots.index,
                lengths=(lengths - self._window).clamp_(min=0),
                topology=self._chain,
                key_bound=slots.key_bound,
                wants=Wants(logits=1 if have is None else None, hidden_layers=(self._fed_back,)),
            )
        )
        if not recorded:
            self._known[slots.host_index] = self._pairs[slots.host_index]
        feature, logits = output.hidden_states[self._fed_back], output.scores
        if have is None:
            feature = feature[:, -1:]
        else:
            last = (have - 1).clamp_(min=0)[:, None]
            feature, logits = _take(feature, last), _take(logits, last)
        self._outputs = feature.new_zeros(len(slots), 1 + self._max_shown, feature.shape[2])
        self._outputs[:, :1] = feature
        return logits

    def level_logits(
        self, slots: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int
    ) -> Float[Tensor, "batch node vocab"]:
        """Returns logits after drafted nodes, each read together with its parent's output."""
        nodes = slice(topology.width - tokens.shape[1], topology.width)
        parents = topology.parents[:, nodes].expand(len(slots), -1)
        output = self.runner.run(
            ForwardBatch(
                tokens=self._to_head(tokens),
                features=_take(self._outputs, parents),
                slots=slots.index,
                lengths=(slots.lengths - 1).clamp_(min=0),
                topology=topology,
                key_bound=slots.key_bound,
                wants=Wants(hidden_layers=(self._fed_back,)),
            )
        )
        self._outputs[:, nodes] = output.hidden_states[self._fed_back]
        return output.scores


def _following(
    tokens: Int[Tensor, "batch position"], counts: Int[Tensor, " batch"], after: Int[Tensor, " batch"]
) -> Int[Tensor, "batch position"]:
    """Returns the token that follows each of the first ``counts`` tokens of every row; the last one is ``after``."""
    return tokens.roll(-1, dims=1).scatter(1, counts[:, None] - 1, after[:, None])


def _take(values: Float[Tensor, "batch some width"], index: Int[Tensor, "batch other"]) -> Tensor:
    """Returns some rows of every batch row."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))
