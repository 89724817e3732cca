"""Requests through an engine, with what was drafted for each of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.drafter_checks.drafts import Draft
from specdec.drafter_checks.watched import Log, Watched
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Round, Verifier
from specdec.requests import SamplingParams
from specdec.target.target import Target

LONG_CHUNK = 512


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
    """What came of a request.

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
    """Returns what comes of requests that are submitted together.

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
