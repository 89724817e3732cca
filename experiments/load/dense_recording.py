"""Records dense traces: the target decodes plainly, and the drafter is asked at every position what it would draft."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafters.combined import CombinedDrafter, CombinedSession
from experiments.load.dense import Dense
from experiments.load.texts import Asked
from specdec.acceptance import ends_at_root
from specdec.batch import Batch
from specdec.drafting.builders.along import AlongOutput, along_output
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Laws, Round, Session, Sizes, Verifier
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness, Noise


def record(
    target: Target,
    drafter: Drafter,
    asked: Sequence[Asked],
    *,
    noise: Noise = Noise.FRESH,
    facts: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dense:
    """Return the dense traces of some requests with a drafter.

    The target decodes every request twice: plainly, and then once more token by token, with drafts along the output at
    every position. Both give the same tokens; where rounding has them differ, the request's trace ends.

    Args:
        drafter: The drafter, without a policy: drafts are as deep as can be.
        noise: What the acceptance rule needs (``Verifier.noise``).
        facts: What the traces should say of themselves.

    Raises:
        ValueError: Acceptance of this drafter's drafts does not follow from the output and its probabilities alone, or
            no request has any output.
    """
    rule = _RootOnly(noise)
    prompts = [list(each.prompt_ids) for each in asked]
    sampling = [each.sampling for each in asked]
    options = {**options, "timing": False}
    with Engine(target, None, rule, **options) as engine:
        outputs = [done.token_ids for done in engine.generate(prompts, sampling)]
    notes = _Notes(outputs, *along_output(drafter, any(not each.greedy for each in sampling)))
    recording = _RecordingDrafter(notes)
    with Engine(target, recording, rule, **options) as engine:
        engine.on_round = notes.look
        engine.generate(prompts, sampling)
    found, cut = notes.requests()
    return Dense.joined(found, {**(facts or {}), "left_their_output": cut, "noise": noise.value})


class _RootOnly(Verifier):
    """Accepts no draft: every round emits one token, drawn from p as plain decoding draws it."""

    exactness = Exactness.EXACT
    samplings = frozenset(DraftSampling)
    recordable = False

    def __init__(self, noise: Noise):
        self.noise = noise

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        return Laws(ends_at_root(target_probs), lambda _: target_probs[:, 0])


class _Notes:
    """The notes on every request while it is decoded once more.

    Args:
        outputs: The output of every request, by its stream.
        builder: Notes what its scorer would draft; None for its own trees.
    """

    def __init__(self, outputs: Sequence[Sequence[int]], drafter: Drafter, builder: AlongOutput | None):
        self.outputs = [np.array(each) for each in outputs]
        self.drafter, self.builder = drafter, builder
        # By request and position: the deepest draft, and a number for every depth of q, nodes, rank and margin.
        self.seen: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._target_probs: dict[tuple[int, int], float] = {}
        self._ends: dict[int, int] = {}  # where a request left its output

    def look(self, played: Round) -> None:
        """Note p of the token that every round has emitted, and whether it is the output's."""
        tokens = played.verdict.next_token.tolist()
        probs = played.target_probs[:, 0].gather(1, played.verdict.next_token[:, None])[:, 0].tolist()
        for request, token, p in zip(played.requests, tokens, probs, strict=True):
            if request is not None:
                number, at = int(request.sampling.stream or 0), len(request.output_ids)
                self._target_probs[number, at] = p
                if at < len(self.outputs[number]) and token != self.outputs[number][at]:
                    self._ends.setdefault(number, at)

    def requests(self) -> tuple[list[Dense], int]:
        """Return the positions of every request that has any, and how many left their output early."""
        depth, found = self.drafter.max_depth, []
        for number, output in enumerate(self.outputs):
            count = min(len(output), self._ends.get(number, len(output)))
            probability, margin = np.zeros((count, depth), np.float32), np.full((count, depth), np.nan, np.float32)
            rank, proposed = np.full((count, depth), -1, np.int32), np.zeros(count, np.int32)
            nodes = np.zeros((count, depth), np.int32)
            for at in range(count):
                deep, q, wide, ranks, margins = self.seen.get((number, at), (0, *np.zeros((4, 0))))
                known = len(ranks)
                proposed[at], nodes[at, :known], rank[at, :known], margin[at, :known] = deep, wide, ranks, margins
                probability[at, :known] = ranks >= 0 if self.builder is None else ranks == 0
                if self.builder is not None and self.builder.drawn and np.isfinite(q).all():
                    p = np.array([self._target_probs.get((number, at + d), 1.0) for d in range(known)])
                    probability[at, :known] = np.minimum(1.0, q / np.maximum(p, 1e-30))
            if count:
                arrays = {"probability": probability, "proposed": proposed, "nodes": nodes, "rank": rank}
                found.append(Dense(lengths=np.array([count]), **arrays, margin=margin))
        return found, len(self._ends)


class _RecordingDrafter(CombinedDrafter):
    """Asks a drafter along known outputs."""

    adapts = True

    def __init__(self, notes: _Notes):
        super().__init__(drafter=notes.drafter)
        self.notes = notes
        self.max_nodes, self.is_chain = notes.drafter.max_nodes, notes.drafter.is_chain

    def bind(self, target: Target, sizes: Sizes) -> "_RecordingSession":
        return _RecordingSession(self, self.notes.drafter.bind(target, sizes), sizes)


class _RecordingSession(CombinedSession):
    """Notes what a session would draft at every position of known outputs."""

    def __init__(self, drafter: _RecordingDrafter, session: Session, sizes: Sizes):
        super().__init__(drafter, session)
        if session.top_tokens:
            raise ValueError(
                f"{type(drafter.notes.drafter).__name__} learns from the drafts that are verified, which other lengths "
                f"change: record another drafter"
            )
        self._notes, self._depth = drafter.notes, drafter.max_depth
        self._stream = np.zeros(sizes.max_batch_size, dtype=np.int64)
        self._prompt = np.zeros(sizes.max_batch_size, dtype=np.int64)

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._stream[slot], self._prompt[slot] = sampling.stream or 0, len(prompt_ids)
        super().admit(slot, prompt_ids, sampling)

    def observe(self, outcome: Any) -> None:
        self.parts[0].observe(outcome)

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree:
        """Draft, and note it."""
        host, notes = batch.on_host, self._notes
        streams = self._stream[host.slots].tolist()
        places = (host.lengths + 1 - self._prompt[host.slots]).tolist()
        following = np.zeros((len(batch), self._depth + 1), dtype=np.int64)
        for row, (stream, at) in enumerate(zip(streams, places, strict=True)):
            behind = notes.outputs[stream][at : at + self._depth + 1]
            following[row, : len(behind)] = behind
        builder = notes.builder
        if builder is not None:
            builder.following = torch.from_numpy(following)
        tree = self.ask(0, batch)
        deepest = np.minimum(host.max_depth, tree.max_depth)
        if builder is None:
            q, nodes, rank, margin, depths = _walked(tree, following)
            deepest = np.minimum(deepest, depths)
        elif tree.max_depth:
            q, rank, margin = (each.cpu().numpy() for each in builder.seen)
            nodes = np.broadcast_to(np.arange(1, rank.shape[1] + 1), rank.shape)
        else:  # nothing was asked for: the last tokens
            q = nodes = rank = margin = np.zeros((len(batch), 0))
        for row, (stream, at) in enumerate(zip(streams, places, strict=True)):
            deep = int(deepest[row])
            notes.seen[stream, at] = deep, *(each[row, :deep] for each in (q, nodes, rank, margin))
        return DraftTree.root_only(batch.roots)  # nothing is verified but the root


def _walked(tree: DraftTree, following: Int[np.ndarray, "batch depth"]) -> tuple[np.ndarray, ...]:
    """Return where outputs stay in drafted trees: no q, nodes and rank by depth, no margin, and how deep they are."""
    parents, tokens, valid, depth = (each.cpu().numpy() for each in (tree.parents, tree.tokens, tree.valid, tree.depth))
    batch, nothing = len(tokens), np.full((len(tokens), following.shape[1]), np.nan)
    rank = np.full((batch, following.shape[1]), -1)
    for row in range(batch):
        at = 0
        for level, token in enumerate(following[row]):
            children = np.flatnonzero((parents[row] == at) & valid[row])
            same = np.flatnonzero(tokens[row, children] == token)
            if not len(same):
                break
            rank[row, level], at = 0 if tree.max_children == 1 else same[0], children[same[0]]
    levels = np.arange(1, following.shape[1] + 1)
    nodes = ((depth > 0) & valid)[:, None] & (depth[:, None] <= levels[:, None])
    return nothing, nodes.sum(-1), rank, nothing, (depth * valid).max(-1)
