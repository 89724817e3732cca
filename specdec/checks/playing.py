"""Requests through an engine, with a look at every tree that is drafted for them."""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from specdec.batch import Batch
from specdec.engine.engine import Engine
from specdec.engine.text import encode_prompt
from specdec.interfaces import Drafter, Round, Session, Sizes, Verifier
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Outcome, Step
from specdec.wellformed import fatal_flaws, flaws

DRAWN = (DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT)  # from q
LONG_CHUNK = 512
TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n",
    "import os",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "for name, value in sorted(options.items()):\n    print(name, value)\n\nfor name, value in",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.",
    "one two three one two three one two",
)
"""Texts of different lengths, some of which repeat themselves, so that prompt lookup has something to find."""
_LENGTHS = (40, 2, 17, 30, 55, 9)


class Status(StrEnum):
    """The end of a check."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_APPLICABLE = "not applicable"
    """The drafter promises nothing that could be checked here."""
    NOT_TRIED = "not tried"
    """An earlier check failed, so that this one would say nothing."""


class End(Exception):  # noqa: N818
    """A check's end before it has passed; ``check`` is the one that it is about, if not the one that is tried."""

    status: Status

    def __init__(self, what: str, check: str | None = None):
        super().__init__(what)
        self.check = check


class Broken(End):
    """The drafter breaks its contract."""

    status = Status.FAILED


class NotApplicable(End):
    """There is nothing to check."""

    status = Status.NOT_APPLICABLE


class NotTried(End):
    """An earlier check failed."""

    status = Status.NOT_TRIED


class Watched(Drafter):
    """Passes everything on to a drafter, and looks at what its sessions propose.

    Args:
        seen: Counts ``trees``, and the drafted ``nodes`` in them.
        spoiled: Some rows' hidden states or logits are NaN. These rows may get any tree that the engine can run.
    """

    def __init__(self, drafter: Drafter, seen: Counter[str], *, spoiled: bool = False):
        self.inner, self.seen, self.spoiled = drafter, seen, spoiled
        self.max_nodes, self.max_depth, self.laws = drafter.max_nodes, drafter.max_depth, frozenset(drafter.laws)
        self.is_chain, self.is_paths = drafter.is_chain, drafter.is_paths
        self.has_leaf_probs, self.adapts = drafter.has_leaf_probs, drafter.adapts

    def bind(self, target: Target, sizes: Sizes) -> "WatchedSession":
        return WatchedSession(self, self.inner.bind(target, sizes), sizes)


class WatchedSession(Session):
    """Passes everything on to a session, and ends in ``Broken`` where it breaks its contract."""

    def __init__(self, drafter: Watched, session: Session, sizes: Sizes):
        self.drafter, self.inner, self.seen = drafter, session, drafter.seen
        self.reads_host, self.models = True, session.models
        self.hidden_layers, self.top_tokens = tuple(session.hidden_layers), session.top_tokens
        self.caches, self.lookback = session.caches, session.lookback
        self._leaf_probs = sizes.leaf_probs

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self.inner.admit(slot, prompt_ids, sampling)

    def observe(self, outcome: Outcome) -> None:
        self.inner.observe(outcome)

    def held(self, slot: int, length: int) -> int:
        return self.inner.held(slot, length)

    def release(self, slot: int) -> None:
        self.inner.release(slot)

    def propose(self, batch: Batch) -> DraftTree:
        before = _arrays(batch)
        self.inner.prepare(batch)
        tree = self.inner.propose(batch)
        after = _arrays(batch)
        self.seen["trees"] += 1
        for name, array in before.items():
            if not np.array_equal(array, after[name]):
                what = f"propose changed slots.{name}, which belongs to the engine: work on a copy"
                raise Broken(what, "slots are left alone")
        whole = flaws(tree, self.drafter, batch, leaf_probs=self._leaf_probs)
        for flaw in fatal_flaws(tree, self.drafter, batch) if self.drafter.spoiled else whole:
            place = "" if flaw.node is None else f"node {flaw.node}: "
            raise Broken(place + flaw.what, f"trees: {flaw.check}")
        self.seen["nodes"] += int((tree.valid[:, 1:] & batch.drafting[:, None]).sum())
        return tree


def _arrays(batch: Batch) -> dict[str, np.ndarray]:
    values = {
        prefix + each.name: getattr(owner, each.name)
        for prefix, owner in (("", batch), ("sampling.", batch.sampling), ("host.", batch.on_host))
        for each in dataclasses.fields(owner)
    }
    tensors = {name: value.clone().cpu().numpy() for name, value in values.items() if isinstance(value, Tensor)}
    return tensors | {name: value.copy() for name, value in values.items() if isinstance(value, np.ndarray)}


@dataclass(frozen=True, eq=False)
class Draft:
    """The valid nodes of one row: token, parent and law of each, the root first; and q after the first of them."""

    nodes: tuple[tuple[int, int, int], ...]
    draft_probs: Float[Tensor, "node vocab"] | None

    @classmethod
    def of(cls, tree: DraftTree, row: int, rows_of_q: int | None) -> "Draft":
        """Return a row of a tree, with q after its first ``rows_of_q`` nodes; None for all."""
        kept = tree.valid[row].nonzero()[:, 0]
        place = {node: index for index, node in enumerate(kept.tolist())} | {-1: -1}
        columns = (tensor[row, kept].tolist() for tensor in (tree.tokens, tree.parents, tree.law))
        nodes = [(token, place[parent], law) for token, parent, law in zip(*columns, strict=True)]
        q = None if tree.draft_probs is None else tree.draft_probs[row, kept[:rows_of_q]].clone()
        return cls(((*nodes[0][:2], 0), *nodes[1:]), q)

    @property
    def drawn_after(self) -> list[int]:
        return sorted({parent for _, parent, law in self.nodes[1:] if law in DRAWN})

    def difference(self, other: "Draft", tolerance: float) -> str | None:
        """Return how two drafts differ, in words; None if they are equal, and q within a tolerance."""
        if self.nodes != other.nodes:
            mine, others = ([each[:2] for each in draft.nodes[1:9]] for draft in (self, other))
            return f"it drafts {mine} instead of {others}, as tokens with their parents"
        if self.draft_probs is None or other.draft_probs is None:
            return None
        read = [node for node in self.drawn_after if node < len(self.draft_probs)]
        apart = float((self.draft_probs[read] - other.draft_probs[read]).abs().max()) if read else 0.0
        return f"q differs by up to {apart:.2g} after the same tokens" if apart > tolerance else None


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    speculate: bool = True

    @property
    def kind(self) -> str:
        return "greedy" if self.sampling.greedy else "sampled"


@dataclass
class Run:
    """A request's steps, its drafts round by round, and the output's length before each of these."""

    steps: list[Step] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    before: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.token_ids]

    @property
    def error(self) -> str | None:
        return next((step.error for step in self.steps if step.error), None)


@dataclass(frozen=True)
class Stage:
    """Where a drafter is tried: how to make it, what it works with, and more arguments of the engines (``options``)."""

    make: Callable[[], Any]
    target: Target
    verifier: Verifier
    max_length: int
    max_depth: int
    adapts: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    spoiled: bool = False

    def engine(self, slots: int = 1, chunk: int = LONG_CHUNK, *, watch: bool = True, **options: Any) -> Engine:
        """Return an engine with a new drafter; nobody may ``watch`` the trees of rounds that are to be recorded."""
        drafter = self.make()
        return Engine(
            self.target,
            Watched(drafter, self.seen, spoiled=self.spoiled) if drafter is not None and watch else drafter,
            self.verifier,
            max_batch_size=slots,
            max_length=self.max_length,
            prefill_chunk=chunk,
            **{**self.options, **options},
        )


def run(
    engine: Engine,
    jobs: Sequence[Job],
    *,
    stop_after: int | None = None,
    rows_of_q: int | None = None,
    on_round: Callable[[Round], None] | None = None,
    watch: bool = True,
    may_fail: bool = False,
) -> list[Run]:
    """Return the outputs and drafts of requests that are submitted together.

    Args:
        stop_after: Drop the requests after this many turns of the engine.
        rows_of_q: The number of nodes after which q is kept, which takes memory; None for all.
        watch: Whether drafts are kept; nobody may look at rounds that are to be recorded.
        may_fail: Whether a failed request is no error here; else it is a ``ValueError``.
    """
    runs: dict[int, Run] = {}

    def note(played: Round) -> None:
        for row, request in enumerate(played.requests):
            if request is not None:
                runs[request.id].drafts.append(Draft.of(played.tree, row, rows_of_q))
                runs[request.id].before.append(len(request.output_ids))
        if on_round is not None:
            on_round(played)

    engine.on_round = note if watch else None
    for job in jobs:
        runs[engine.submit(job.prompt, job.sampling, speculate=job.speculate)] = Run()
    turns = 0
    while engine.unfinished and turns != stop_after:
        for step in engine.step():
            runs[step.request].steps.append(step)
        turns += 1
    for number in list(runs):
        engine.abort(number)
    errors = [each.error for each in runs.values() if each.error]
    if errors and not may_fail:
        raise ValueError(f"a request failed: {errors[0]}")
    return list(runs.values())


def prompts_for(target: Target, given: Sequence[str | Sequence[int]] | None, seed: int) -> list[tuple[int, ...]]:
    """Return two or more prompts of at least two tokens: those given, built-in texts, or if need be random tokens."""
    if given is None and target.tokenizer is None:
        rng = random.Random(seed)
        few = [rng.randrange(target.vocab_size) for _ in range(12)]
        return [tuple(rng.choice(few) for _ in range(length)) for length in _LENGTHS]
    encoded = [
        tuple(encode_prompt(target.tokenizer, each) if isinstance(each, str) else map(int, each))
        for each in (TEXTS if given is None else given)
    ]
    encoded = [each for each in encoded if len(each) > 1]
    if len(encoded) < 2:
        raise ValueError(f"{len(encoded)} prompts have two tokens or more: give at least two such prompts, or none")
    return encoded
