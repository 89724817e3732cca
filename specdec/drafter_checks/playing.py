"""Requests through an engine, with what was drafted for each of them."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from specdec.drafter_checks.watched import Log, Watched
from specdec.engine.engine import Engine
from specdec.engine.text import encode_prompt
from specdec.interfaces import Drafter, Round, Verifier
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import DraftSampling

DRAWN = (DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT)
"""The laws of tokens that are drawn from q."""
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


@dataclass(frozen=True, eq=False)
class Draft:
    """The valid nodes of one row.

    Attributes:
        tokens: Their tokens, the root first.
        parents: Their parents, as indices into this draft.
        laws: How each was drawn.
        draft_probs: q after the first of them; None if the tree has none.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    laws: tuple[int, ...]
    draft_probs: Float[Tensor, "node vocab"] | None

    @classmethod
    def of(cls, tree: DraftTree, row: int, *, rows_of_q: int | None = None) -> "Draft":
        """Returns a row of a tree.

        Args:
            tree: The tree.
            row: The row.
            rows_of_q: After how many nodes q is kept, which takes memory; None for all.
        """
        nodes: Int[Tensor, " node"] = tree.valid[row].nonzero()[:, 0]
        place = {node: index for index, node in enumerate(nodes.tolist())} | {-1: -1}
        return cls(
            tokens=tuple(tree.tokens[row, nodes].tolist()),
            parents=tuple(place[parent] for parent in tree.parents[row, nodes].tolist()),
            laws=(0, *tree.law[row, nodes].tolist()[1:]),
            draft_probs=None if tree.draft_probs is None else tree.draft_probs[row, nodes[:rows_of_q]].clone(),
        )

    def difference(self, other: "Draft", tolerance: float) -> str | None:
        """Returns how two drafts differ, in words; None if they are equal, q within a tolerance.

        Args:
            other: The other draft.
            tolerance: The largest difference between two entries of q that counts as rounding.
        """
        if self.tokens != other.tokens or self.parents != other.parents or self.laws != other.laws:
            return f"{self.nodes} instead of {other.nodes}"
        mine, theirs = self.draft_probs, other.draft_probs
        read = sorted({self.parents[node] for node in range(1, len(self.tokens)) if self.laws[node] in DRAWN})
        if not read or mine is None or theirs is None:
            return None
        read = [node for node in read if node < len(mine)]
        apart = float((mine[read] - theirs[read]).abs().max())
        return f"q differs by up to {apart:.2g} after the same tokens" if apart > tolerance else None

    @property
    def nodes(self) -> str:
        """The drafted tokens, each with its parent's index if that is not the node before."""
        drafted = [
            str(token) if parent == node - 1 else f"{token} under node {parent}"
            for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True))
            if node > 0
        ]
        return f"[{', '.join(drafted[:8])}{', …' if len(drafted) > 8 else ''}]" if drafted else "no tokens"


@dataclass(frozen=True)
class Job:
    """One request.

    Attributes:
        prompt: Its tokens.
        sampling: Its parameters, with seed and stream.
        speculate: Whether the drafter works for it.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    speculate: bool = True


@dataclass
class Run:
    """The output and the drafts of a request.

    Attributes:
        tokens: Its output.
        drafts: What was drafted for it, round by round.
        before: The number of output tokens before each of these rounds.
        error: Why it failed, if it did.
    """

    tokens: list[int] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Stage:
    """Where a drafter is tried: how to make it, and what it works with.

    Attributes:
        make: Makes a new drafter.
        target: The target.
        verifier: An acceptance rule that takes its drafts.
        max_length: Tokens per request.
        log: Takes what all of its trees show.
        options: More arguments of the engines.
    """

    make: Callable[[], Drafter]
    target: Target
    verifier: Verifier
    max_length: int
    log: Log
    options: Mapping[str, Any] = field(default_factory=dict)

    def engine(self, *, slots: int = 1, chunk: int = LONG_CHUNK, verifier: Verifier | None = None) -> Engine:
        """Returns an engine with a new drafter, whose trees are looked at."""
        return Engine(
            self.target,
            Watched(self.make(), self.log),
            verifier or self.verifier,
            max_batch_size=slots,
            max_length=self.max_length,
            prefill_chunk=chunk,
            **self.options,
        )


def run(
    engine: Engine,
    jobs: Sequence[Job],
    *,
    stop_after: int | None = None,
    rows_of_q: int | None = None,
    on_round: Callable[[Round], None] | None = None,
    may_fail: bool = False,
) -> list[Run]:
    """Returns the outputs and drafts of requests that are submitted together.

    Args:
        engine: The engine.
        jobs: The requests.
        stop_after: Drop the requests after this many turns of the engine.
        rows_of_q: See ``Draft.of``.
        on_round: Called with every round that speculates.
        may_fail: A request that fails keeps its error.

    Raises:
        ValueError: A request failed that may not.
    """
    runs: dict[int, Run] = {}

    def note(played: Round) -> None:
        for row, request in enumerate(played.requests):
            if request is not None:
                runs[request.id].drafts.append(Draft.of(played.tree, row, rows_of_q=rows_of_q))
                runs[request.id].before.append(len(request.output_ids))
        if on_round is not None:
            on_round(played)

    engine.on_round = note
    for job in jobs:
        runs[engine.submit(job.prompt, job.sampling, speculate=job.speculate)] = Run()
    turns = 0
    while engine.unfinished and turns != stop_after:
        for step in engine.step():
            runs[step.request].tokens += step.token_ids
            if step.finish_reason == "error":
                runs[step.request].error = step.error
        turns += 1
    for number in list(runs):
        engine.abort(number)
    errors = [each.error for each in runs.values() if each.error and not may_fail]
    if errors:
        raise ValueError(f"a request failed: {errors[0]}")
    return list(runs.values())


def prompts_for(target: Target, texts: Sequence[str | Sequence[int]] | None, seed: int) -> list[tuple[int, ...]]:
    """Returns at least two prompts of at least two tokens.

    Args:
        target: Encodes text.
        texts: The caller's prompts, as text or token ids; None for the built-in ones. A target without a tokenizer then
            gets random tokens that repeat themselves.
        seed: The seed of random tokens.

    Raises:
        ValueError: There are too few prompts, or too short ones.
    """
    if texts is None and target.tokenizer is None:
        rng = random.Random(seed)
        few = [rng.randrange(target.vocab_size) for _ in range(12)]
        return [tuple(rng.choice(few) for _ in range(length)) for length in _LENGTHS]
    given = TEXTS if texts is None else texts
    encoded = [
        tuple(encode_prompt(target.tokenizer, each) if isinstance(each, str) else [int(token) for token in each])
        for each in given
    ]
    encoded = [each for each in encoded if len(each) > 1]
    if len(encoded) < 2:
        raise ValueError(f"{len(encoded)} prompts have two tokens or more: give at least two such prompts, or none")
    return encoded
