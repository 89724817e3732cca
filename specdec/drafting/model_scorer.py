"""A causal LM as a scorer: one with a KV cache of its own, one with recurrent layers, or the target's first layers."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.cache.states import States
from specdec.drafting.scorer import Follower, Logits, forward_of
from specdec.forward import LOGITS, ForwardBatch, Wants
from specdec.target.runner import ModelRunner
from specdec.topology import Topology
from specdec.types import HostOutcome, Outcome

LAST = Wants(logits=1)
_IN_STEP = np.iinfo(np.int64).max  # of a row that lacks the last committed token at most


def chunk(tokens: Tensor, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> ForwardBatch:
    """The forward of a piece of every row's tokens."""
    return ForwardBatch.of_chunk(tokens, host_slots=slots, host_lengths=starts, host_counts=counts)


class ModelScorer(Follower):
    """Scores with a model whose cache is kept in step with what the target has committed.

    The last committed token may be missing there, because leaves are never forwarded: ``root_logits`` forwards it with
    the root. ``prepare`` forwards what else is missing, after rounds without a tree or with another drafter's nodes.
    ``to_model`` turns the target's token ids into the model's.
    """

    lookback = 1  # the last token is kept

    def __init__(
        self, runner: ModelRunner, *, max_batch_size: int, to_model: Callable[[Tensor], Tensor] = lambda tokens: tokens
    ):
        super().__init__(runner, slots=max_batch_size)
        self._to_model = to_model
        self._pair = Topology.chain(2, runner.device)
        # By slot: up to where keys and values are right, and whether a tree was grown since the last round.
        self._known = np.full(max_batch_size, _IN_STEP)
        self._grown = np.zeros(max_batch_size, dtype=bool)
        self._every = False  # whether every row has a committed token

    def admit(self, slot: int, length: int) -> None:
        self._known[slot], self._grown[slot] = _IN_STEP, False

    def held(self, slot: int, length: int) -> int:
        return max(min(length - 1, int(self._known[slot])), 0)

    def observe(self, outcome: Outcome, nodes: Int[Tensor, "batch depth"] | None) -> None:
        host = outcome.host
        if outcome.path is None:
            assert host is not None, "pieces of prompts come with the host's numbers"
            self._prefill(self._to_model(outcome.tokens), host)
        else:
            self._commit(outcome, nodes)
        self.keep_last(outcome)
        if host is not None and host.path is not None:  # another session decides who drafts
            self._follow(host, host.path)

    def _prefill(self, tokens: Int[Tensor, "batch position"], host: HostOutcome) -> None:
        self.runner.run(chunk(tokens, host.slots, host.starts, host.counts))

    def _commit(self, outcome: Outcome, nodes: Int[Tensor, "batch depth"] | None) -> None:
        if nodes is not None:
            self.runner.cache.commit(outcome.slots, outcome.starts, nodes)

    def _follow(self, host: HostOutcome, path: Int[np.ndarray, "batch depth"]) -> None:
        """Note how far the cache of every row is right after a round in which others may have drafted.

        All but the last of its own nodes were forwarded; behind them, the path may go on with another drafter's.
        """
        known, grown = self._known[host.slots], self._grown[host.slots]
        shown = (path >= 0).cumprod(1).sum(1)
        after = np.where(shown >= host.counts - 1, _IN_STEP, host.starts + shown)
        idle = np.where(known == _IN_STEP, np.maximum(host.starts - 1, 0), known)
        self._known[host.slots] = np.where(grown, after, idle)
        self._grown[host.slots] = False

    def skip(self, batch: Batch) -> None:
        host = batch.on_host
        known = self._known[host.slots]
        self._known[host.slots] = np.where(known == _IN_STEP, np.maximum(host.lengths - 1, 0), known)
        self._grown[host.slots] = False

    def prepare(self, batch: Batch) -> Hashable:
        """Catch up, in the rows that may have drafts now."""
        host = batch.on_host
        self._every = bool((host.lengths > 0).all())
        known = self._known[host.slots]
        missing = host.lengths - np.minimum(known, host.lengths)
        behind = missing > 1
        rows = np.flatnonzero(behind & host.drafting & (host.max_depth > 0))
        if len(rows):
            self._catch_up(batch.rows(rows), known[rows])
            behind[rows] = False
        self._known[host.slots] = np.where(behind, known, _IN_STEP)
        self._grown[host.slots] = ~behind
        return self.runner.version, self._every

    def _catch_up(self, batch: Batch, starts: Int[np.ndarray, " batch"]) -> None:
        """Prefill what is missing, but for the last token, which is forwarded with the root."""
        host = batch.on_host
        missing = host.lengths - 1 - starts
        index = np.minimum(starts[:, None] + np.arange(int(missing.max())), host.tokens.shape[1] - 1)
        tokens = torch.from_numpy(np.take_along_axis(host.tokens, index, axis=1).astype(np.int64))
        tokens = self._to_model(tokens.to(self.runner.device))
        self.runner.run(chunk(tokens, host.slots, starts, missing))

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        lengths, last, again = batch.lengths, self._last_token[batch.slots], None
        if self._every:  # as nearly always: a prompt of one token has nothing there
            lengths = lengths - 1
        else:
            again = lengths > 0
            lengths, last = lengths - again.long(), torch.where(again, last, batch.roots)
        tokens = self._to_model(torch.stack([last, batch.roots], dim=1))
        wants = LAST if again is None else LOGITS
        scores = self.runner.run(forward_of(batch, tokens, self._pair, lengths, wants=wants)).scores
        return scores if again is None else scores.gather(1, again.long()[:, None, None].expand(-1, 1, scores.shape[2]))

    def level_logits(self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int) -> Logits:
        return self.runner.run(forward_of(batch, self._to_model(tokens), topology)).scores


class RecurrentScorer(ModelScorer):
    """Scores with a model whose states have all committed tokens but the last one.

    A state cannot take a token back, and a leaf was never forwarded. So every tree begins with the last committed token
    above the root, and all of its nodes above the last accepted one are committed.
    """

    needs_state = True  # at first there is no last token
    lookback = None  # states have all tokens in them

    def __init__(self, runner: ModelRunner, *, max_batch_size: int, **given: Any):
        super().__init__(runner, max_batch_size=max_batch_size, **given)
        if self._states.short is not None:  # a tree that grows goes on from its nodes' states
            raise self._states.short
        with torch.inference_mode(False):  # by slot: whether a tree was grown since the last round
            self._trees = torch.zeros(max_batch_size, dtype=torch.bool, device=runner.device)
        self._lengths = np.zeros(max_batch_size, dtype=np.int64)  # of what is observed before the first rounds

    def admit(self, slot: int, length: int) -> None:
        super().admit(slot, length)
        self._lengths[slot] = length

    @property
    def _states(self) -> States:
        assert self.runner.cache.states is not None, "the model has recurrent layers"
        return self.runner.cache.states

    def _prefill(self, tokens: Int[Tensor, "batch position"], host: HostOutcome) -> None:
        """Prefill a piece of a prompt, but for its last token."""
        counts = host.counts - (host.starts + host.counts == self._lengths[host.slots])
        if counts.any():
            self.runner.run(chunk(tokens, host.slots, host.starts, counts))

    def _commit(self, outcome: Outcome, nodes: Int[Tensor, "batch depth"] | None) -> None:
        """Make the last token, the root and all accepted nodes but the last one final.

        Rows that drafted nothing for some rounds were forwarded behind other tokens: their states stay as they are.
        """
        path = outcome.path
        assert path is not None, "a round"
        own = (path >= 0).cumprod(1)  # behind them, the path may go on with another drafter's nodes
        nodes = torch.arange(1, path.shape[1] + 1, device=path.device).expand_as(path) if nodes is None else nodes
        above = torch.nn.functional.pad(nodes, (1, 0))[:, : path.shape[1]] + 1  # node 0 is the last token, 1 the root
        in_step = self._trees[outcome.slots] & (self._states.lengths[outcome.slots] == outcome.starts - 1)
        self._trees[outcome.slots] = False
        counts = torch.where(in_step & (outcome.counts > 0), 1 + own.sum(1), 0)
        starts = (outcome.starts - 1).clamp(min=0)
        self.runner.cache.commit(outcome.slots, starts, above.where(own > 0, -1), counts)

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        self._trees[batch.slots] = True
        tokens = self._to_model(torch.stack([self._last_token[batch.slots], batch.roots], dim=1))
        lengths = self._states.lengths[batch.slots]
        return self.runner.run(forward_of(batch, tokens, self._pair, lengths, wants=LAST)).scores

    def level_logits(self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int) -> Logits:
        below = _kept_below_last(topology) if topology.static else _below_last(topology)
        lengths = self._states.lengths[batch.slots]
        return self.runner.run(forward_of(batch, self._to_model(tokens), below, lengths)).scores


def _below_last(topology: Topology) -> Topology:
    """Return a topology with a node above its root."""
    with torch.inference_mode(False):
        parents = torch.nn.functional.pad(topology.parents + 1, (1, 0), value=-1)
        return replace(topology, parents=parents, max_depth=topology.max_depth + 1)


_kept_below_last = lru_cache(maxsize=1024)(_below_last)


class ExitScorer(Follower):
    """Scores with the target's first layers, whose output goes to its own output layer (early exit).

    Nothing is prefilled, committed or kept: keys and values of drafted nodes are written where verification writes the
    same ones.
    """

    lookback = 0

    def __init__(self, runner: ModelRunner):
        super().__init__(runner)
        self.caches = ()
        self._root = Topology.chain(1, runner.device)

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        return self.runner.run(forward_of(batch, batch.roots[:, None], self._root, wants=LAST)).scores

    def level_logits(self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int) -> Logits:
        return self.runner.run(forward_of(batch, tokens, topology)).scores
