"""A causal LM with recurrent layers as a scorer: a state cannot take a token back, so the last one is not in it yet."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.cache.states import States
from specdec.drafting.model_scorer import LAST, ModelScorer, chunk
from specdec.drafting.scorer import Logits, forward_of
from specdec.target.runner import ModelRunner
from specdec.topology import Topology
from specdec.types import HostOutcome, Outcome


class RecurrentScorer(ModelScorer):
    """Scores with a model whose states have all committed tokens but the last one.

    The last node of an accepted path was never forwarded if it was a leaf. So every tree begins with the last committed
    token, then the root, then the root's children; and what is committed of it are all of its nodes above the last one
    that was accepted.
    """

    needs_state = True  # at first there is no last token

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

    def _read(self, tokens: Int[Tensor, "batch position"], host: HostOutcome) -> None:
        """Prefill a piece of a prompt, but for the prompt's last token."""
        counts = host.counts - (host.starts + host.counts == self._lengths[host.slots])
        if counts.any():
            self.runner.run(chunk(tokens, host.slots, host.starts, counts))

    def _commit(self, outcome: Outcome, nodes: Int[Tensor, "batch depth"] | None) -> None:
        """Make the last token, the root and all accepted nodes but the last one final.

        Rows whose states are behind, because they drafted nothing for some rounds, have been forwarded behind other
        tokens; they are left as they are.
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
        """Return logits at the root, after forwarding the last committed token, too."""
        self._trees[batch.slots] = True
        tokens = self._to_model(torch.stack([self._last_token[batch.slots], batch.roots], dim=1))
        lengths = self._states.lengths[batch.slots]
        return self.runner.run(forward_of(batch, tokens, self._pair, lengths, wants=LAST)).scores

    def level_logits(self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int) -> Logits:
        """Return logits at the next nodes of a tree, above which everything has its states."""
        below = _kept_below_last(topology) if topology.static else _below_last(topology)
        lengths = self._states.lengths[batch.slots]
        return self.runner.run(forward_of(batch, self._to_model(tokens), below, lengths)).scores


def _below_last(topology: Topology) -> Topology:
    """Return a topology with a node above its root."""
    with torch.inference_mode(False):
        parents = torch.nn.functional.pad(topology.parents + 1, (1, 0), value=-1)
        return replace(topology, parents=parents, max_depth=topology.max_depth + 1)


_kept_below_last = lru_cache(maxsize=1024)(_below_last)
