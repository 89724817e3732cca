"""A head that reads pairs (the target's hidden state at t, token t+1) as a scorer: EAGLE's heads, MTP modules.

Where they stand: the pair of position t stands at position t of the head's own KV cache. With L committed tokens, the
newest complete pair is (state at L-1, root). It stands at L-1 and is node 0 of the tree that is grown. A drafted node's
pair is (its parent's output, its token). Nothing of a tree is committed: the pairs of accepted tokens are forwarded
again, with the target's hidden states in place of the head's own outputs.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.scorer import Scorer, forward_of
from specdec.forward import ForwardBatch, Wants
from specdec.target.runner import ModelRunner
from specdec.topology import Topology
from specdec.types import Outcome

_FORWARDED = -1
"""Stands for a window of pairs that are all in the cache, until ``observe`` counts new ones."""

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
        window: The most pairs that a round can add: one more than the trees' depth.
        max_shown: The most nodes that are shown to it in one tree, the root not counted.
        layers: The hidden states of the target that a feature is made of.
        fuse: Makes features of them.
        fed_back: Which of the head's hidden states is the feature of a node's children.
        to_head: Turns the target's token ids into those that the head embeds.
        fuse_version: Tells when ``fuse`` has changed.
    """

    needs_state = True

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
        self.model = self.runner = runner
        self.caches, self.lookback = (runner.cache,), window
        self._window, self._max_shown = window, max_shown
        self._layers, self._fuse, self._to_head = tuple(layers), fuse, to_head
        self._fuse_version, self._fed_back = fuse_version, fed_back
        device, dtype = runner.device, runner.facts.dtype
        # The most pairs of each slot's window that may not be in the cache yet, and how many they were before a tree
        # was grown. All of the window is forwarded by `root_logits`, so that only rounds in which no tree is grown can
        # add more than it holds.
        self._waiting = np.zeros(max_batch_size, dtype=np.int64)
        self._before = np.zeros(max_batch_size, dtype=np.int64)
        self._prepared = np.zeros(0, dtype=np.int64)  # the slots of this round
        self._every = False  # whether every row that drafts has a full window
        with torch.inference_mode(False):
            self._features = torch.zeros(max_batch_size, window, width, dtype=dtype, device=device)
            self._tokens = torch.zeros(max_batch_size, window, dtype=torch.long, device=device)
            self._cells = torch.arange(window, device=device)
        self._chain = Topology.chain(window, device)
        self._outputs = self._features[:0, :1]  # of the tree that is grown, by node

    def admit(self, slot: int) -> None:
        """Begin without a pair."""
        self._waiting[slot] = 0

    def held(self, slot: int, length: int) -> int:
        """See ``Session.held``: pairs in the window may not be in the cache yet."""
        return max(length - self._window, 0)

    def release(self, slot: int) -> None:
        """Forget a row's window."""
        self._features[slot] = 0

    # ---------------------------------------------------------------- what becomes final

    def observe(self, outcome: Outcome, nodes: Int[Tensor, "batch depth"] | None) -> None:
        """Forward the pairs of a piece of a prompt; keep those of a round.

        A round of more pairs than the window holds, whose drafts were another drafter's, is taken in pieces.
        """
        slots, starts, counts = outcome.slots, outcome.starts, outcome.counts
        states = [outcome.hidden_states[layer] for layer in self._layers]
        features, tokens = self._fuse(states).to(self._features.dtype), _following(outcome)
        if outcome.path is None:
            assert outcome.host is not None, "pieces of prompts come with the host's numbers"
            host = outcome.host
            self._forward(tokens, features, slots, starts)
            self._push(slots, features, tokens, counts)
            self._waiting[host.slots] = 0
            return
        where = self._prepared if outcome.host is None else outcome.host.slots
        for first in range(0, tokens.shape[1], self._window):
            piece = slice(first, first + self._window)
            new = min(self._window, tokens.shape[1] - first)
            self._waiting[where] = self._waiting[where].clip(min=0)
            if (self._waiting[where] + new > self._window).any():  # no room for more
                newest, states, begins, _ = self._newest(slots, starts + counts.clamp(max=first))
                self._forward(newest, states, slots, begins)
                self._waiting[where] = 0
            self._push(slots, features[:, piece], tokens[:, piece], (counts - first).clamp(0, self._window))
            self._waiting[where] += new

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

    def _newest(
        self, slots: Int[Tensor, " batch"], lengths: Int[Tensor, " batch"], *, full: bool = False
    ) -> tuple[Tensor, Tensor, Int[Tensor, " batch"], Int[Tensor, " batch"] | None]:
        """Return the tokens and features of the newest pairs, where the first of them stands, and how many they are."""
        tokens, features = self._tokens[slots], self._features[slots]
        if full:
            return tokens, features, (lengths - self._window).clamp_(min=0), None
        # Shorter rows begin at position 0, with what there is; what follows their last pair is never read.
        have = lengths.clamp(max=self._window)
        index = (self._window - have[:, None] + self._cells).clamp_(max=self._window - 1)
        return tokens.gather(1, index), _take(features, index), (lengths - self._window).clamp_(min=0), have

    def _forward(
        self,
        tokens: Int[Tensor, "batch position"],
        features: Float[Tensor, "batch position width"],
        slots: Int[Tensor, " batch"],
        starts: Int[Tensor, " batch"],
    ) -> None:
        """Put pairs into the cache. Padding is written behind them; later pairs overwrite it before it is read."""
        self.runner.run(
            ForwardBatch(
                tokens=self._to_head(tokens),
                features=features,
                slots=slots,
                lengths=starts,
                topology=Topology.chain(tokens.shape[1], tokens.device),
                wants=Wants(logits=0),
            )
        )

    # ---------------------------------------------------------------- a tree

    def prepare(self, batch: Batch) -> Hashable:
        """See whether every row that drafts has a full window; no pair can be missing."""
        host = batch.on_host
        self._prepared, waiting = host.slots, self._waiting[host.slots]
        # A recorded round does not count the pairs that it adds.
        self._before[host.slots] = np.where(waiting == _FORWARDED, self._window, waiting)
        self._waiting[host.slots] = _FORWARDED  # by `root_logits`
        self._every = bool((host.lengths[host.drafting] >= self._window).all())
        return self.runner.version, self._fuse_version(), self._every

    def skip(self, batch: Batch) -> None:
        """Note that the windows were not forwarded."""
        slots = batch.on_host.slots
        self._waiting[slots] = self._before[slots]

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        """Return logits after the newest pair, from a forward of the window's pairs."""
        tokens, features, starts, have = self._newest(batch.slots, batch.lengths, full=self._every)
        wants = Wants(logits=1 if have is None else None, hidden_layers=(self._fed_back,))
        output = self.runner.run(
            forward_of(batch, self._to_head(tokens), self._chain, starts, features=features, wants=wants)
        )
        feature, logits = output.hidden_states[self._fed_back], output.scores
        if have is None:
            feature = feature[:, -1:]
        else:
            last = (have - 1).clamp_(min=0)[:, None]
            feature, logits = _take(feature, last), _take(logits, last)
        self._outputs = feature.new_zeros(len(batch), 1 + self._max_shown, feature.shape[2])
        self._outputs[:, :1] = feature
        return logits

    def level_logits(
        self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int
    ) -> Float[Tensor, "batch node vocab"]:
        """Return logits after drafted nodes, each read together with its parent's output."""
        nodes = slice(topology.width - tokens.shape[1], topology.width)
        parents = topology.parents[:, nodes].expand(len(batch), -1)
        lengths, features = (batch.lengths - 1).clamp_(min=0), _take(self._outputs, parents)
        wants = Wants(hidden_layers=(self._fed_back,))
        output = self.runner.run(
            forward_of(batch, self._to_head(tokens), topology, lengths, features=features, wants=wants)
        )
        self._outputs[:, nodes] = output.hidden_states[self._fed_back]
        return output.scores


def _following(outcome: Outcome) -> Int[Tensor, "batch position"]:
    """Return the token that follows each of the tokens that became final; what follows in padding means nothing."""
    last = (outcome.counts[:, None] - 1).clamp_(min=0)
    return outcome.tokens.roll(-1, dims=1).scatter(1, last, outcome.next_tokens[:, None])


def _take(values: Float[Tensor, "batch some width"], index: Int[Tensor, "batch other"]) -> Tensor:
    """Return some rows of every batch row."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))
