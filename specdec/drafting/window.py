"""Scorers that forward each row's newest entries together, when a tree is grown: a window at addresses that stay."""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.scorer import Scorer
from specdec.forward import ForwardBatch, Wants
from specdec.target.runner import ModelRunner
from specdec.topology import Topology
from specdec.types import Outcome

_FORWARDED = -1
"""Stands for a window of entries that are all in the cache, until ``observe`` counts new ones."""

Fuse = Callable[[list[Tensor]], Tensor]
"""Makes features, ``[batch, position, width]``, of the target's hidden states, one tensor per layer."""


class WindowScorer(Scorer):
    """Scores with a model whose cache holds one entry per committed position.

    The entry of position t is the token there, or a *pair*: a feature of the target's hidden state at t, and the token
    after it, of which the newest is the root.

    Each slot keeps its last ``window`` entries, at addresses that stay. A tree begins with a forward of all of them, so
    that this forward has one size whatever was accepted: the entries that are new since the last tree, and before them
    some that are written once more. A round makes at most as many new entries as the window holds; those of prompts are
    forwarded when they are observed. Nothing of a tree is committed.

    Args:
        runner: The model. Its forward takes ``features`` if there are any.
        window: The most entries that a round can add: one more than the trees' depth.
        width: Of a feature; 0 for entries that are tokens alone.
        layers: The hidden states of the target that a feature is made of.
        fuse: Makes features of them; None for entries that are tokens alone.
        to_model: Turns the target's token ids into the model's.
        fuse_version: Tells when ``fuse`` has changed.
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
        self.model = self.runner = runner
        self.needs_state = fuse is not None
        self.caches, self.lookback = (runner.cache,), window
        self._window, self._layers, self._fuse, self._to_model = window, tuple(layers), fuse, to_model
        self._fuse_version = fuse_version
        device, dtype = runner.device, runner.facts.dtype
        # The most entries of each slot's window that may not be in the cache yet, and how many they were before a tree
        # was grown. All of the window is forwarded when one is, so that only rounds in which none is can add more than
        # it holds.
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

    def held(self, slot: int, length: int) -> int:
        """See ``Session.held``: entries in the window may not be in the cache yet."""
        return max(length - self._window, 0)

    def release(self, slot: int) -> None:
        """Forget a row's window."""
        self._features[slot] = 0

    # ---------------------------------------------------------------- what becomes final

    def observe(self, outcome: Outcome, nodes: Int[Tensor, "batch depth"] | None) -> None:
        """Forward the entries of a piece of a prompt; keep those of a round.

        A round of more entries than the window holds, whose drafts were another drafter's, is taken in pieces.
        """
        slots, starts, counts = outcome.slots, outcome.starts, outcome.counts
        tokens, features = self._entries(outcome)
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

    def _entries(self, outcome: Outcome) -> tuple[Tensor, Tensor]:
        """Return the tokens and features of the positions that have become final."""
        if self._fuse is None:
            return outcome.tokens, self._features.new_zeros(*outcome.tokens.shape, 0)
        states = [outcome.hidden_states[layer] for layer in self._layers]
        return following(outcome), self._fuse(states).to(self._features.dtype)

    def _push(
        self,
        slots: Int[Tensor, " batch"],
        features: Float[Tensor, "batch position width"],
        tokens: Int[Tensor, "batch position"],
        counts: Int[Tensor, " batch"],
    ) -> None:
        """Put the first ``counts`` entries of every row behind those in its window, whose oldest ones drop out."""
        index = counts[:, None] + self._cells
        tokens = torch.cat([self._tokens[slots], tokens], dim=1)
        features = torch.cat([self._features[slots], features], dim=1)
        self._tokens[slots] = tokens.gather(1, index)
        self._features[slots] = take(features, index)

    def _newest(
        self, slots: Int[Tensor, " batch"], lengths: Int[Tensor, " batch"], *, full: bool = False
    ) -> tuple[Tensor, Tensor, Int[Tensor, " batch"], Int[Tensor, " batch"] | None]:
        """Return the tokens and features of the newest entries, where the first one stands, and how many they are."""
        tokens, features = self._tokens[slots], self._features[slots]
        if full:
            return tokens, features, (lengths - self._window).clamp(min=0), None
        # Shorter rows begin at position 0, with what there is; what follows their last entry is never read.
        have = lengths.clamp(max=self._window)
        index = (self._window - have[:, None] + self._cells).clamp_(max=self._window - 1)
        return tokens.gather(1, index), take(features, index), (lengths - self._window).clamp(min=0), have

    def _forward(
        self,
        tokens: Int[Tensor, "batch position"],
        features: Float[Tensor, "batch position width"],
        slots: Int[Tensor, " batch"],
        starts: Int[Tensor, " batch"],
    ) -> None:
        """Put entries into the cache. Padding is written behind them; later ones overwrite it before it is read."""
        self.runner.run(
            ForwardBatch(
                tokens=self._to_model(tokens),
                features=given(features),
                slots=slots,
                lengths=starts,
                topology=Topology.chain(tokens.shape[1], tokens.device),
                wants=Wants(logits=0),
            )
        )

    # ---------------------------------------------------------------- a tree

    def prepare(self, batch: Batch) -> Hashable:
        """See whether every row that drafts has a full window; no entry can be missing."""
        host = batch.on_host
        self._prepared, waiting = host.slots, self._waiting[host.slots]
        # A recorded round does not count the entries that it adds.
        self._before[host.slots] = np.where(waiting == _FORWARDED, self._window, waiting)
        self._waiting[host.slots] = _FORWARDED  # at the beginning of the tree
        self._every = bool((host.lengths[host.drafting] >= self._window).all())
        return self.runner.version, self._fuse_version(), self._every

    def skip(self, batch: Batch) -> None:
        """Note that the windows were not forwarded."""
        slots = batch.on_host.slots
        self._waiting[slots] = self._before[slots]


def following(outcome: Outcome) -> Int[Tensor, "batch position"]:
    """Return the token that follows each of the tokens that became final; what follows in padding means nothing."""
    last = (outcome.counts[:, None] - 1).clamp_(min=0)
    return outcome.tokens.roll(-1, dims=1).scatter(1, last, outcome.next_tokens[:, None])


def given(features: Float[Tensor, "batch some width"]) -> Tensor | None:
    """Return what a forward is given as features: None where entries are tokens alone."""
    return features if features.shape[2] else None


def take(values: Float[Tensor, "batch some width"], index: Int[Tensor, "batch other"]) -> Tensor:
    """Return some rows of every batch row."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))
