"""A causal LM as a scorer: with a KV cache, recurrent layers, another tokenizer, or the target's first layers."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import ne
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
from specdec.target.spelling import Retokenized, Spelling
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
    """Scores with a model whose states have all committed tokens but the last one, with which every tree begins.

    A state cannot take a token back, and a leaf was never forwarded.
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
        counts = host.counts - (host.starts + host.counts == self._lengths[host.slots])
        if counts.any():
            self.runner.run(chunk(tokens, host.slots, host.starts, counts))

    def _commit(self, outcome: Outcome, nodes: Int[Tensor, "batch depth"] | None) -> None:
        """Make the last token, the root and all accepted nodes but the last one final, in rows that are in step."""
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
    with torch.inference_mode(False):
        parents = torch.nn.functional.pad(topology.parents + 1, (1, 0), value=-1)
        return replace(topology, parents=parents, max_depth=topology.max_depth + 1)


_kept_below_last = lru_cache(maxsize=1024)(_below_last)


class ExitScorer(Follower):
    """Scores with the target's first layers and its output layer (early exit), in the target's own cache."""

    lookback = 0

    def __init__(self, runner: ModelRunner):
        super().__init__(runner)
        self.caches = ()
        self._root = Topology.chain(1, runner.device)

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        return self.runner.run(forward_of(batch, batch.roots[:, None], self._root, wants=LAST)).scores

    def level_logits(self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int) -> Logits:
        return self.runner.run(forward_of(batch, tokens, topology)).scores


class RetokenizedScorer(Follower):
    """Scores with a model that has another tokenizer than the target.

    Before a tree is grown, the text of a row is read in the model's tokens. The cache keeps the common beginning with
    the last round's; the rest is forwarded with the last token. Its session must say ``reads_host``.

    ``source`` spells the target's tokens and ``own`` the model's, whose cache has the last ``max_tokens`` of a text at
    most. Every round forwards ``width`` of them. ``to_model`` has the model's token for every token that is scored, and
    ``columns`` are the columns of its logits that count, in order; None for its own tokens and all columns.
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
        self.caches, self.vocab_size = (), runner.vocab_size if columns is None else len(columns)
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
        host = batch.on_host
        for row in np.flatnonzero(host.drafting & (host.max_depth > 0)).tolist():
            slot = int(host.slots[row])
            read = self.texts[slot].read(host.tokens[row, : host.lengths[row] + 1].tolist()) or [0]
            over = len(read) - self._most
            step = max(self._most // 2, 1)
            self._wanted[slot] = read[-(-over // step) * step :] if over > 0 else read
        slots = host.slots.tolist()
        wanted = [self._wanted[slot] for slot in slots]
        known = np.array([[*map(ne, self._held[slot], self._wanted[slot]), True].index(True) for slot in slots])
        lengths = np.array([len(ids) for ids in wanted])
        # Every round forwards equally many tokens, some of them again, so that its forward can be captured.
        width = self._width if lengths.min() >= self._width else 1
        missing = lengths - width - known
        behind = np.flatnonzero(missing > 0)
        if len(behind):
            tokens = np.zeros((len(behind), int(missing.max())), dtype=np.int64)
            for place, row in enumerate(behind.tolist()):
                tokens[place, : missing[row]] = wanted[row][known[row] : -width]
            on_device = torch.from_numpy(tokens).to(self.runner.device)
            self.runner.run(chunk(on_device, host.slots[behind], known[behind], missing[behind]))
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
