"""A drafter that passes everything on to another one, and looks at what that one proposes."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.batch import Batch
from specdec.interfaces import Drafter, Session, Sizes
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import Outcome
from specdec.wellformed import FATAL, Flaw, Form, flaws


class MalformedError(Exception):
    """A tree that the engine cannot run."""


@dataclasses.dataclass
class Log:
    """Observations of a drafter; shared by all that are made in one check.

    Attributes:
        depth: The largest depth of a node, as announced.
        adapts: As announced.
        flaws: The first flaw of every kind, by the name of its check.
        changed: What ``propose`` changed in the slots, if anything.
        trees: The number of trees that were looked at.
        nodes: The number of valid drafted nodes.
        drawn: The number of these nodes that were drawn at random from a q.
        told: The number of nodes for which the drafter was told the target's likeliest successors.
        top_tokens: How many successors of every node its session wants.
        untold: What was wrong with that, if anything.
        spoiled: Whether hidden states or logits of some rows are NaN, so that their q may be no distribution.
    """

    depth: int
    adapts: bool
    flaws: dict[str, Flaw] = dataclasses.field(default_factory=dict)
    changed: str | None = None
    trees: int = 0
    nodes: int = 0
    drawn: int = 0
    told: int = 0
    top_tokens: int = 0
    untold: str | None = None
    spoiled: bool = False


class Watched(Drafter):
    """Passes everything on to a drafter.

    Args:
        drafter: The drafter that is checked.
        log: Takes what is found.
    """

    def __init__(self, drafter: Drafter, log: Log):
        self.inner, self.log = drafter, log
        self.max_nodes, self.max_depth = drafter.max_nodes, drafter.max_depth
        self.laws = frozenset(drafter.laws)
        self.is_chain, self.is_paths = drafter.is_chain, drafter.is_paths
        self.has_leaf_probs, self.adapts = drafter.has_leaf_probs, drafter.adapts

    def bind(self, target: Target, sizes: Sizes) -> "WatchedSession":
        """Bind the drafter."""
        return WatchedSession(self, self.inner.bind(target, sizes), sizes)


class WatchedSession(Session):
    """Passes everything on to a session, and looks at its proposals.

    Args:
        drafter: The drafter's wrapper.
        session: The session.
        sizes: The engine's sizes.
    """

    def __init__(self, drafter: Watched, session: Session, sizes: Sizes):
        self.drafter, self.inner, self.log = drafter, session, drafter.log
        self.reads_host, self.models = True, session.models
        self.hidden_layers, self.top_tokens = tuple(session.hidden_layers), session.top_tokens
        self.log.top_tokens = session.top_tokens
        self._leaf_probs = sizes.leaf_probs
        self._plain: set[int] = set()  # slots whose next token is the likeliest of the target's own logits

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Begin a request."""
        plain = sampling.greedy and sampling.repetition_penalty == 1.0 and sampling.logits_processor is None
        (self._plain.add if plain else self._plain.discard)(slot)
        self.inner.admit(slot, prompt_ids, sampling)

    def observe(self, outcome: Outcome) -> None:
        """Report what became final."""
        if self.top_tokens and outcome.path is not None:
            self.log.untold = self.log.untold or self._untold(outcome)
        self.inner.observe(outcome)

    def release(self, slot: int) -> None:
        """End a request."""
        self.inner.release(slot)

    def _untold(self, outcome: Outcome) -> str | None:
        """Return what is wrong with the target's successors of every node; None if nothing is."""
        nodes, top = outcome.node_tokens, outcome.top_tokens
        if nodes is None or top is None or top.shape != (*nodes.shape, self.top_tokens):
            shape = None if top is None else tuple(top.shape)
            return f"the drafter wants {self.top_tokens} successors of every node, and was told {shape}"
        self.log.told += nodes.numel()
        assert outcome.path is not None
        for row, slot in enumerate(outcome.slots.tolist()):
            if slot not in self._plain or not int(outcome.counts[row]):
                continue
            path = [node for node in outcome.path[row].tolist() if node >= 0]
            emitted = [*nodes[row, path].tolist(), int(outcome.next_tokens[row])]
            for node, token in zip([0, *path], emitted, strict=True):
                if token not in top[row, node].tolist():
                    return f"token {token} is what the target says after node {node}, and is not among its successors"
        return None

    def propose(self, batch: Batch) -> DraftTree:
        """Return the session's proposal, after a look at it.

        Raises:
            MalformedError: The engine could not go on with this tree.
        """
        before = _copy(batch)
        self.inner.prepare(batch)
        tree = self.inner.propose(batch)
        self.log.changed = self.log.changed or _changed(before, batch)
        self.log.trees += 1
        for flaw in flaws(tree, self.drafter, batch, leaf_probs=self._leaf_probs):
            self.log.flaws.setdefault(flaw.check, flaw)
            if flaw.check in FATAL and not (self.log.spoiled and flaw.check is Form.Q):
                raise MalformedError(flaw.what)
        drafted = tree.valid[:, 1:] & batch.drafting[:, None]
        self.log.nodes += int(drafted.sum())
        self.log.drawn += int((drafted & ((tree.law[:, 1:] == 1) | (tree.law[:, 1:] == 2))).sum())
        return tree


def _fields(batch: Batch) -> dict[str, Tensor | np.ndarray]:
    """Returns all arrays of the batch, by name."""
    found = {}
    for owner in (batch, batch.sampling, batch.on_host):
        prefix = "" if owner is batch else "sampling." if owner is batch.sampling else "host."
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name)
            if isinstance(value, Tensor | np.ndarray):
                found[f"{prefix}{field.name}"] = value
    return found


def _copy(batch: Batch) -> dict[str, Tensor | np.ndarray]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value.copy() for name, value in _fields(batch).items()
    }


def _changed(before: dict[str, Tensor | np.ndarray], batch: Batch) -> str | None:
    """Returns the name of the first array that is not what it was."""
    for name, value in _fields(batch).items():
        old = before[name]
        same = (
            torch.equal(value, old)
            if isinstance(value, Tensor) and isinstance(old, Tensor)
            else np.array_equal(value, old)
        )
        if not same:
            return name
    return None
