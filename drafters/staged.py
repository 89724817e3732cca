"""Staged drafts: a drafting model that is itself accelerated by a cheaper drafter, in any number of stages.

Staged speculative decoding (Spector & Ré 2023, arXiv 2308.04623) with n-grams before a small model, polybasic decoding
(arXiv 2510.26527) with several models. The model's chain is drawn by rounds of its own, with an exact rule, so it is a
draw from the model. All tokens of a chain stand in line behind the committed ones, in every stage's cache, and one that
was not accepted is written over by the one in its place. How far each cache is right is a number per row.
"""

import copy
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from drafters.combined import CombinedDrafter, CombinedSession
from drafters.heads.bound import row_of
from drafters.own_model import CausalDrafter
from specdec import Batch, Drafter, ModelRunner, Sizes, StatelessDrafter, Target, Topology, Verifier
from specdec.acceptance import Plain, accept, certain
from specdec.arguments import instance
from specdec.drafting.builders import StaticTree
from specdec.drafting.drawing import Drawing
from specdec.drafting.scored import ScoredSession
from specdec.filters import first_largest
from specdec.forward import LOGITS, ForwardBatch, Wants
from specdec.random import Purpose, mix, uniforms
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling, Exactness, Noise, Outcome, Verdict

_STAGE = 0x5354414745
"""Makes of a request's random key that of its rounds one stage down."""


class StagedDrafter(CombinedDrafter):
    """Drafts a model's chain, which a cheaper drafter drafts for the model.

    Args:
        model: A drafter with a causal LM that draws a chain: ``ModelDrafter``, ``SelfDrafter``. Its temperature counts.
        helper: Another one of these, a drafter without state that drafts chains (``NGramDrafter(branches=1)``), or a
            ``StagedDrafter`` for further stages.
        rule: The exact rule by which the model accepts the helper's drafts.
    """

    def __init__(self, model: CausalDrafter, helper: Drafter, rule: Verifier):
        instance("model", model, CausalDrafter, "a drafter with a causal LM, such as ModelDrafter(…)")
        remedy = "a ModelDrafter, a StagedDrafter, or a drafter without state, such as NGramDrafter(branches=1)"
        instance("helper", helper, (CausalDrafter, StatelessDrafter, StagedDrafter), remedy)
        instance("rule", rule, Verifier, "an acceptance rule, such as RejectionVerifier()")
        super().__init__(model=model, helper=helper)
        further = isinstance(helper, StagedDrafter)
        self.parts = (model, *(helper.parts if further else (helper,)))
        self.rules: tuple[Verifier, ...] = (rule, *(helper.rules if further else ()))
        for name, part in (("model", model), ("helper", helper)):
            if not part.is_chain:
                raise ValueError(f"{name}: {type(part).__name__} drafts trees, and stages draft chains: give a chain")
            if isinstance(part, CausalDrafter) and (part.laws != {DraftSampling.IID} or part.at_once):
                raise ValueError(f"{name}: {type(part).__name__} does not draw token by token: give sampling='iid'")
        if rule.exactness is not Exactness.EXACT or rule.noise is not Noise.FRESH:
            raise ValueError(
                f"rule={type(rule).__name__}: the chain would not be drawn from the model; give an exact rule with "
                f"random numbers of its own, such as RejectionVerifier()"
            )
        rule.check(helper)
        self.laws, self.adapts = model.laws, model.adapts or helper.adapts
        self.max_nodes = self.max_depth = model.max_depth
        self.is_chain = True

    def bind(self, target: Target, sizes: Sizes) -> "StagedSession":
        sessions: list[Any] = []
        for part in self.parts:
            stage = part
            if isinstance(part, CausalDrafter):
                stage = copy.copy(part)
                stage.tree = StaticTree(self.max_depth)
            sessions.append(stage.bind(target, sizes))
        return StagedSession(self, sessions, sizes)


class _Stage:
    """A model that draws chains, and its rule for what is drafted for it.

    Attributes:
        known, held: The position up to which the cache is right: by row of the round, and by slot at its end.
        ran: Whether the model ran in this round.
    """

    def __init__(self, session: ScoredSession, rule: Verifier, sizes: Sizes):
        runner = session.scorer.model
        assert isinstance(runner, ModelRunner), "a causal LM runs in one"
        self.session, self.rule, self.runner = session, rule, runner
        self._to_model = row_of(runner.model, session.vocabulary.target)
        runner.refuse_states("draft in stages")
        self.held = np.zeros(sizes.max_batch_size, dtype=np.int64)
        self.known, self.ran = self.held, False

    def begin(self, batch: Batch) -> None:
        """Catch up; the last committed token may be missing still."""
        self.session.prepare(batch)
        self.known, self.ran = np.maximum(batch.on_host.lengths - 1, 0), False

    def scores(self, batch: Batch, width: int) -> Float[Tensor, "batch node vocab"]:
        """Return logits at the roots and the tokens behind them, after a forward of these and of what is missing."""
        host, self.ran = batch.on_host, True
        back = int((host.lengths - self.known).max())
        starts = np.maximum(host.lengths - back, 0)
        index = np.minimum(starts[:, None] + np.arange(back + width), host.tokens.shape[1] - 1)
        tokens = _there(np.take_along_axis(host.tokens, index, axis=1), batch.device)
        aligned = bool((starts + back == host.lengths).all())  # as nearly always: not where a sequence begins
        scores = self.runner.run(
            ForwardBatch(
                tokens=self._to_model(tokens),
                slots=batch.slots,
                lengths=_there(starts, batch.device),
                topology=Topology.chain(back + width, batch.device),
                key_bound=int(starts.max()) + back + width,
                wants=Wants(logits=width) if aligned else LOGITS,
            )
        ).scores
        if aligned:
            return scores
        rows = _there((host.lengths - starts)[:, None] + np.arange(width), batch.device)
        return scores.gather(1, rows[..., None].expand(-1, -1, scores.shape[2]))


class StagedSession(CombinedSession):
    """The stages of a ``StagedDrafter`` in one engine."""

    def __init__(self, drafter: StagedDrafter, sessions: list[Any], sizes: Sizes):
        super().__init__(drafter, *sessions)
        self._temperatures = [part.temperature for part in drafter.parts if isinstance(part, CausalDrafter)]
        models = sessions[: len(self._temperatures)]
        rules = [*drafter.rules, Plain()]  # the last model decodes plainly, if nothing drafts for it
        self._stages = [_Stage(each, rule, sizes) for each, rule in zip(models, rules, strict=False)]
        self._begin = np.zeros(0, dtype=np.int64)  # where the roots of this round stand

    def observe(self, outcome: Outcome) -> None:
        host = outcome.host
        assert host is not None, "the engine gives the host's numbers to a session that reads them"
        for stage in self._stages:
            shown = outcome
            if host.path is not None:
                held = np.arange(host.path.shape[1]) < (stage.held[host.slots] - host.starts)[:, None]
                shown = replace(outcome, host=replace(host, path=np.where(held, host.path, -1)))
            stage.session.observe(shown)

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree:
        """Draw a chain from the first stage's model for every row."""
        host = batch.on_host
        for stage in self._stages:
            stage.begin(batch)
        self._begin = host.lengths
        # What is drafted stands behind the sequences, where helpers look them up.
        tree = self._chains(0, replace(batch, host=replace(host, tokens=host.tokens.copy())))
        for stage in self._stages:
            stage.held[host.slots] = stage.known
            if not stage.ran:
                stage.session.scorer.skip(batch)
        return tree

    def _chains(self, level: int, batch: Batch) -> DraftTree:
        """Return a chain of a stage's model for every row, as long as it drafts and the row has room for."""
        host, stage = batch.on_host, self._stages[level]
        room = np.where(host.drafting, np.minimum(host.max_depth, self.depths[level]), 0)
        width = int(room.max())
        if width == 0:
            return DraftTree.root_only(batch.roots)
        drawing = Drawing.of(batch, stage.session.vocabulary, DraftSampling.IID, self._temperatures[level])
        q = drawing.room(width + 1) if drawing.sampled else None
        drawn = np.zeros_like(room)
        for number in itertools.count():
            left = room - drawn
            if not left.any():
                break
            inner = _behind(batch, drawn, left - 1, number, self.depths[level])
            guess = self._guesses(level + 1, inner)
            verdict, p = self._judged(stage, drawing, inner, guess)
            ends = inner.on_host.lengths
            counts = np.minimum(verdict.num_accepted.cpu().numpy() + 1, left)  # NaN accepts anything
            emitted = torch.cat([guess.tokens[:, 1:], verdict.next_token[:, None]], 1)
            emitted = emitted.scatter(1, verdict.num_accepted[:, None], verdict.next_token[:, None]).cpu().numpy()
            row, place = np.nonzero(np.arange(guess.width) < counts[:, None])
            host.tokens[row, ends[row] + 1 + place] = emitted[row, place]
            if q is not None and p is not None:
                at = _there(row, batch.device), _there(place, batch.device)
                q[at[0], _there(drawn[row] + place, batch.device)] = p[at]
            stage.known = ends + counts
            for cheaper in self._stages[level + 1 :]:
                cheaper.known = np.minimum(cheaper.known, stage.known)
            drawn = drawn + counts
        columns = np.minimum(host.lengths[:, None] + np.arange(width + 1), host.tokens.shape[1] - 1)
        tokens = _there(np.take_along_axis(host.tokens, columns, axis=1), batch.device)
        valid = None if (room == width).all() else _there(np.arange(width + 1) <= room[:, None], batch.device)
        law = drawing.law_of(tokens)
        return DraftTree.from_shape(TreeShape.chain(width), tokens, valid=valid, sampling=law, draft_probs=q)

    def _guesses(self, level: int, batch: Batch) -> DraftTree:
        """Return the next stage's drafts, and write them behind the sequences."""
        host = batch.on_host
        if level < len(self._stages):
            return self._chains(level, batch)
        if level == len(self.parts) or not (host.drafting & (host.max_depth > 0)).any():
            return DraftTree.root_only(batch.roots)
        guess = self.ask(level, batch)
        if (host.max_depth < guess.max_depth).any():
            guess = guess.limited(batch.max_depth)
        row, place = np.nonzero(guess.valid[:, 1:].cpu().numpy())
        host.tokens[row, host.lengths[row] + 1 + place] = guess.tokens[:, 1:].cpu().numpy()[row, place]
        return guess

    def _judged(
        self, stage: _Stage, drawing: Drawing, batch: Batch, guess: DraftTree
    ) -> tuple[Verdict, Float[Tensor, "batch node vocab"] | None]:
        """Verify drafts with a stage's model; return what is accepted, and what followed each node was drawn from."""
        scores = drawing.scores(stage.scores(batch, guess.width), *self._paths(drawing, batch, guess.width))
        if not drawing.sampled:
            return certain(guess, drawing.vocabulary.to_target(first_largest(scores))), None
        p = drawing.room(guess.width)
        drawing.vocabulary.put(p, slice(0, guess.width), drawing.distribution(scores))
        return accept(stage.rule, guess, p, uniforms(batch.keys, batch.rounds, Purpose.ACCEPT, 2)), p

    def _paths(
        self, drawing: Drawing, batch: Batch, width: int
    ) -> tuple[Int[Tensor, "batch token"] | None, Bool[Tensor, "batch node token"] | None]:
        """Return all tokens from the round's roots on, and which of them stand above or at each node, if they count."""
        if not drawing.by_path:
            return None, None
        host, drafted = batch.on_host, batch.on_host.lengths - self._begin
        columns = np.arange(int(drafted.max()) + width)
        index = np.minimum(self._begin[:, None] + columns, host.tokens.shape[1] - 1)
        above = columns <= drafted[:, None, None] + np.arange(width)[:, None]
        return _there(np.take_along_axis(host.tokens, index, axis=1), batch.device), _there(above, batch.device)


def _behind(batch: Batch, drawn: Int[np.ndarray, " batch"], room: np.ndarray, number: int, most: int) -> Batch:
    """Return the rows as they are behind tokens that were drawn, in a round of their own, with random numbers of it."""
    host = batch.on_host
    lengths, room = host.lengths + drawn, np.maximum(room, 0)
    return replace(
        batch,
        roots=_there(host.tokens[np.arange(len(batch)), lengths], batch.device),
        lengths=_there(lengths, batch.device),
        max_depth=_there(room, batch.device),
        keys=mix(batch.keys + _STAGE),
        rounds=batch.rounds * most + number,
        host=replace(host, lengths=lengths, max_depth=room),
        first_slot=None,
    )


def _there(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array if array.dtype == bool else array.astype(np.int64))
    return tensor.to(device, non_blocking=True)
