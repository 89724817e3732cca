"""Scorers that forward each row's newest entries together, when a tree is grown: a window at addresses that stay."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.scorer import Follower, Logits, forward_of
from specdec.forward import Wants
from specdec.target.runner import ModelRunner
from specdec.topology import Topology
from specdec.types import Outcome

_FORWARDED = -1  # a window of entries that are all in the cache

Fuse = Callable[[list[Tensor]], Tensor]
"""Makes features, ``[batch, position, width]``, of the target's hidden states, one tensor per layer."""


class WindowScorer(Follower):
    """Scores with a model whose cache holds one entry per committed position.

    The entry of position t is the token there, or a *pair*: a feature of the target's hidden state at t, and the token
    after it. Each slot keeps its last ``window`` entries. A tree begins with a forward of all of them, which has one
    size whatever was accepted: some are written once more. Nothing of a tree is committed.

    Args:
        window: The most entries that a round can add: one more than the trees' depth.
        width: Width of a feature; 0 for entries that are tokens alone.
        layers: The hidden states of the target of which ``fuse`` makes a feature, until ``fuse_version`` changes.
        to_model: Turns the target's token ids into the model's.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_batch_size: int,
        window: int,
        width: int = 0,
        layers: Sequence[int] = (),
        fuse: Fuse | None = None,
        to_model: Callable[[Tensor], Tensor] = lambda tokens: tokens,
        fuse_version: Callable[[], Hashable] = lambda: None,
    ):
        super().__init__(runner)
        self.needs_state, self.lookback = fuse is not None, window
        self._window, self._layers, self._fuse, self._to_model = window, tuple(layers), fuse, to_model
        self._fuse_version, self._has_features = fuse_version, width > 0
        device, dtype = runner.device, runner.facts.dtype
        # The most entries of each slot's window that may not be in the cache yet, and how many before a tree was grown.
        # Only rounds in which no tree is grown can add more than the window holds.
        self._waiting = np.zeros(max_batch_size, dtype=np.int64)
        self._before = np.zeros(max_batch_size, dtype=np.int64)
        self._prepared = np.zeros(0, dtype=np.int64)  # the slots of this round
        self._every = False  # whether every row that drafts has a full window
        with torch.inference_mode(False):
            self._features = torch.zeros(max_batch_size, window, width, dtype=dtype, device=device)
            self._tokens = torch.zeros(max_batch_size, window, dtype=torch.long, device=device)
            self._cells = torch.arange(window, device=device)

    def admit(self, slot: int, length: int) -> None:
        self._waiting[slot] = 0

    def held(self, slot: int, length: int) -> int:  # entries in the window may not be in the cache yet
        return max(length - self._window, 0)

    def release(self, slot: int) -> None:
        self._features[slot] = 0

    def observe(self, outcome: Outcome, nodes: Int[Tensor, "batch depth"] | None) -> None:
        """Forward the entries of a piece of a prompt; keep those of a round, in pieces if the window is too small."""
        slots, starts, counts = outcome.slots, outcome.starts, outcome.counts
        tokens, features = self._entries(outcome)
        if outcome.path is None:
            assert outcome.host is not None, "pieces of prompts come with the host's numbers"
            host = outcome.host
            self._put(tokens, features, slots, starts)
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
                self._put(newest, states, slots, begins)
                self._waiting[where] = 0
            self._push(slots, features[:, piece], tokens[:, piece], (counts - first).clamp(0, self._window))
            self._waiting[where] += new

    def _entries(self, outcome: Outcome) -> tuple[Tensor, Tensor]:
        if self._fuse is None:
            return outcome.tokens, self._features.new_zeros(*outcome.tokens.shape, 0)
        states = [outcome.hidden_states[layer] for layer in self._layers]
        last = (outcome.counts[:, None] - 1).clamp_(min=0)
        following = outcome.tokens.roll(-1, dims=1).scatter(1, last, outcome.next_tokens[:, None])
        return following, self._fuse(states).to(self._features.dtype)

    def _push(self, slots: Tensor, features: Tensor, tokens: Tensor, counts: Int[Tensor, " batch"]) -> None:
        index = counts[:, None] + self._cells
        tokens = torch.cat([self._tokens[slots], tokens], dim=1)
        features = torch.cat([self._features[slots], features], dim=1)
        self._tokens[slots] = tokens.gather(1, index)
        self._features[slots] = take(features, index)

    def _newest(
        self, slots: Int[Tensor, " batch"], lengths: Int[Tensor, " batch"], *, full: bool = False
    ) -> tuple[Tensor, Tensor, Int[Tensor, " batch"], Int[Tensor, " batch"] | None]:
        tokens, features = self._tokens[slots], self._features[slots]
        if full:
            return tokens, features, (lengths - self._window).clamp(min=0), None
        # Shorter rows begin at position 0, with what there is; what follows their last entry is never read.
        have = lengths.clamp(max=self._window)
        index = (self._window - have[:, None] + self._cells).clamp_(max=self._window - 1)
        return tokens.gather(1, index), take(features, index), (lengths - self._window).clamp(min=0), have

    def _put(self, tokens: Tensor, features: Tensor, slots: Tensor, starts: Tensor) -> None:
        self.read(self._to_model(tokens), slots, starts, features=features if self._has_features else None)

    def prepare(self, batch: Batch) -> Hashable:
        host = batch.on_host
        self._prepared, waiting = host.slots, self._waiting[host.slots]
        # A recorded round does not count the entries that it adds.
        self._before[host.slots] = np.where(waiting == _FORWARDED, self._window, waiting)
        self._waiting[host.slots] = _FORWARDED  # at the beginning of the tree
        self._every = bool((host.lengths[host.drafting] >= self._window).all())
        return self.runner.version, self._fuse_version(), self._every

    def skip(self, batch: Batch) -> None:
        slots = batch.on_host.slots
        self._waiting[slots] = self._before[slots]


class FeatureScorer(WindowScorer):
    """Scores level by level with a head that reads its own output where the target has not been run yet: EAGLE, MTP.

    With L committed tokens the newest complete pair, (state at L-1, root), is node 0 of the tree. A drafted node's pair
    is (its parent's output, its token), where ``fed_back`` says which of the head's hidden states that is.
    """

    def __init__(self, runner: ModelRunner, *, fuse: Fuse, fed_back: int, **window: Any):
        super().__init__(runner, fuse=fuse, **window)
        self._fed_back = fed_back
        self._chain = Topology.chain(self._window, runner.device)
        # What the head has returned for the nodes of the last forward, from which node on.
        self._outputs, self._first = self._features[:0, :1], 0

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        tokens, features, starts, have = self._newest(batch.slots, batch.lengths, full=self._every)
        wants = Wants(logits=1 if have is None else None, hidden_layers=(self._fed_back,))
        output = self.runner.run(
            forward_of(batch, self._to_model(tokens), self._chain, starts, features=features, wants=wants)
        )
        feature, logits = output.hidden_states[self._fed_back], output.scores
        if have is None:
            feature = feature[:, -1:]
        else:
            last = (have - 1).clamp_(min=0)[:, None]
            feature, logits = take(feature, last), take(logits, last)
        self._outputs, self._first = feature, 0
        return logits

    def level_logits(self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int) -> Logits:
        first = topology.width - tokens.shape[1]
        features, lengths = self._outputs, (batch.lengths - 1).clamp(min=0)
        if not topology.in_line:  # all parents were in the last forward
            features = take(features, topology.parents[:, first:].expand(len(batch), -1) - self._first)
        wants = Wants(hidden_layers=(self._fed_back,))
        output = self.runner.run(
            forward_of(batch, self._to_model(tokens), topology, lengths, features=features, wants=wants)
        )
        self._outputs, self._first = output.hidden_states[self._fed_back], first
        return output.scores


class ParallelScorer(WindowScorer):
    """Scores all depths at once: the logits of a depth do not depend on the tokens drafted above (PARD, P-EAGLE).

    A round's forward holds the window, the root if entries are tokens alone, and a mask for every depth but the first.
    The newest complete entry predicts depth 1, and mask i depth i + 1. Masks are ``mask_token`` with ``mask_feature``,
    or what ``fill`` returns for every row; they alone go through the adapter of that number.
    """

    per_depth = True

    def __init__(
        self,
        runner: ModelRunner,
        *,
        mask_token: int,
        mask_feature: Callable[[], Tensor] | None = None,
        fill: Callable[[Batch, int], Tensor] | None = None,
        adapter: int = 0,
        **window: Any,
    ):
        super().__init__(runner, **window)
        runner.refuse_states("fill masks")
        self._mask_token, self._mask_feature = mask_token, mask_feature
        self._rooted = mask_feature is None
        self._fill, self._adapter = fill, adapter
        self._made_at: Hashable = None
        with torch.inference_mode(False):
            self._feature = torch.zeros_like(self._features[0, 0])

    def prepare(self, batch: Batch) -> Hashable:
        version = self._fuse_version()
        if self._mask_feature is not None and version != self._made_at:
            self._feature.copy_(self._mask_feature())
            self._made_at = version
        return super().prepare(batch)

    def all_logits(self, batch: Batch, depth: int) -> Float[Tensor, "batch depth vocab"]:
        slots, window, every = batch.slots, self._window, self._every
        masks = self._tokens.new_full((len(batch), depth - 1), self._mask_token)
        if self._fill is not None:
            masks = self._fill(batch, depth - 1)
        behind = [self._to_model(batch.roots)[:, None], masks] if self._rooted else [masks]
        tokens = torch.cat([self._to_model(self._tokens[slots]), *behind], dim=1)
        nodes = tokens.shape[1]
        features = torch.cat([self._features[slots], self._feature.expand(len(batch), nodes - window, -1)], dim=1)
        adapters = None
        if self._adapter:
            adapters = torch.zeros_like(tokens)
            adapters[:, nodes - depth + 1 :].fill_(self._adapter)  # a number assigned would become a tensor first
        lengths, bound = batch.lengths, batch.key_bound
        have = lengths.clamp(max=window)
        if not every:  # shorter rows begin at position 0, with what there is, and end in what is never read
            index = window - have[:, None] + torch.arange(nodes, device=batch.device)
            index = index.clamp_(max=nodes - 1)
            tokens, features = tokens.gather(1, index), take(features, index)
            adapters = None if adapters is None else adapters.gather(1, index)
            bound = None if bound is None else bound + nodes
        logits = self.runner.run(
            forward_of(
                batch,
                tokens,
                Topology.chain(nodes, batch.device),
                (lengths - window).clamp_(min=0),
                features=features if self._has_features else None,
                adapters=adapters,
                key_bound=bound,
                wants=Wants(logits=depth if every else None),
            )
        ).scores
        if every:
            return logits
        first = have if self._rooted else (have - 1).clamp_(min=0)
        return take(logits, first[:, None] + torch.arange(depth, device=batch.device))


def take(values: Float[Tensor, "batch some width"], index: Int[Tensor, "batch other"]) -> Tensor:
    """Return some rows of every batch row."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))
