"""Dense traces: what the target would accept at every position of its own outputs, whichever round comes there.

Let x be an output of the target, and r the probability min(1, q(x) / p(x)) of each of its tokens under the drafter's q.
Then rejection sampling of chains commits tokens with the joint law of x, and accepts token for token with probability
r, independently given x: to accept and emit y has the mass min(p, q)(y), to reject and emit y the mass (p - q)⁺(y), and
they add up to p(y). So one output with its r replays every policy of lengths exactly, whatever it looks at in history
or load, without a model. Drafts that are chosen without randomness are accepted where the output goes on like them, and
their trees are replayed by the rank of the output's token among siblings. One kind is replayed at full depth alone: a
look-up that may choose another match where it is asked for fewer tokens (``drafters.ngram``).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specdec.shape import TreeShape

KIND = "dense traces of acceptance"
"""The mark of their files."""


@dataclass(frozen=True, kw_only=True)
class Dense:
    """The acceptance at every position of some outputs, for drafts that begin there.

    The positions of all requests stand one behind the other. Position i of a request is that of a round's root which
    has i output tokens before it and itself, and column d is the d + 1st drafted token.

    Attributes:
        lengths: Positions of every request: the tokens of its output.
        probability: That a drafted token is accepted, given that those above it are.
        proposed: How deep the drafter would draft.
        nodes: How many nodes such a draft has down to every depth: as many as it is deep, in a chain.
        rank: Where the output's token stands among the drafter's candidates, 0 for the likeliest; -1 for behind all.
        margin: Difference of the drafter's two largest log-probabilities before the token, in nats; NaN if unknown.
        facts: What was recorded: target, drafter, sampling, prompts.
    """

    lengths: Int[np.ndarray, " request"]
    probability: Float[np.ndarray, "position depth"]
    proposed: Int[np.ndarray, " position"]
    nodes: Int[np.ndarray, "position depth"]
    rank: Int[np.ndarray, "position depth"]
    margin: Float[np.ndarray, "position depth"]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """The deepest drafts."""
        return self.probability.shape[1]

    @cached_property
    def begins(self) -> Int[np.ndarray, " request"]:
        """The first position of every request."""
        return np.concatenate([[0], self.lengths.cumsum()[:-1]]).astype(np.int64)

    @property
    def has_margins(self) -> bool:
        """Whether the drafter's margins are known."""
        return bool(len(self.margin)) and not bool(np.isnan(self.margin[:, 0]).all())

    def accepted(self, rng: np.random.Generator, copies: int = 1) -> Int[np.ndarray, "copy position"]:
        """Draw how many tokens of the deepest chain are accepted at every position.

        A round of less depth accepts as many, or all of its drafts. A round comes to a position once at most, so the
        numbers of different positions may be drawn in advance. All of it is drawn ``copies`` times.
        """
        certain = ((self.probability == 0) | (self.probability == 1)).all()
        kept = self.probability > (0.5 if certain else rng.random((copies, *self.probability.shape)))
        counts = np.logical_and.accumulate(kept, axis=-1).sum(-1)
        return np.broadcast_to(counts, (copies, len(self.proposed)))

    def accepted_in(self, shape: TreeShape) -> Int[np.ndarray, "1 position"]:
        """Return how deep the output stays in a tree of the drafter's likeliest tokens, at every position."""
        children = np.full((shape.num_nodes + 1, shape.max_children + 1), -1)
        for node, own in enumerate(shape.children):
            children[node, : len(own)] = own
        at, depth = np.zeros(len(self.proposed), dtype=np.int64), np.zeros(len(self.proposed), dtype=np.int64)
        for level in range(min(shape.max_depth, self.depth)):
            rank = self.rank[:, level].astype(np.int64)
            known = np.where((rank >= 0) & (rank < shape.max_children), rank, shape.max_children)
            at = np.where(at >= 0, children[at, known], -1)
            depth += at >= 0
        return depth[None]

    def save(self, path: Path) -> Path:
        """Write it as safetensors."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _arrays()}
        save_file(arrays, path, metadata={"kind": KIND, "facts": json.dumps(dict(self.facts), default=str)})
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Dense":
        """Return what ``save`` has written; refuse any other file."""
        try:
            with safe_open(str(path), framework="numpy") as file:
                about = file.metadata() or {}
                if about.get("kind") != KIND:
                    raise ValueError("it is of another kind")
                return cls(**{name: file.get_tensor(name) for name in _arrays()}, facts=json.loads(about["facts"]))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path} holds no dense traces ({' '.join(str(error).split())}): record them with experiments.load "
                f"clock=record"
            ) from error

    @classmethod
    def joined(cls, requests: Sequence["Dense"], facts: Mapping[str, Any]) -> "Dense":
        """Return traces one behind the other, at least one."""
        if not requests:
            raise ValueError("no request was recorded, so there is no trace: give more requests")
        arrays = {name: np.concatenate([getattr(each, name) for each in requests]) for name in _arrays()}
        return cls(**arrays, facts=facts)


def _arrays() -> list[str]:
    return [each.name for each in fields(Dense) if each.name != "facts"]
