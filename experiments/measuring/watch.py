"""A look at every round while it is measured: its trace, and how far a lossy rule is from the target."""

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from experiments.contenders.base import OtherEngine
from experiments.measuring.jobs import Job
from experiments.tracing.distance import Distance, distances_of
from experiments.tracing.trace import TraceKey, TraceWriter
from specdec.engine.engine import Engine
from specdec.interfaces import Round
from specdec.types import Exactness


@dataclass
class Watch:
    """Observations of one call of the engine, on the clock of ``time.perf_counter``.

    Attributes:
        seconds: How long looking took, which is not part of the call's time.
        looks: When every look ended, and how long all looks took until then.
        joules: The energy that the device used in the call; None where no counter tells, or where somebody looked.
        distances: Of each round's first token from the target's distribution, by the job's random stream; empty for an
            exact rule.
    """

    seconds: float = 0.0
    looks: list[tuple[float, float]] = field(default_factory=list)
    began: float = 0.0
    joules: float | None = None
    distances: dict[int, list[Distance]] = field(default_factory=dict)

    def without_looking(self, moment: float) -> float:
        """Return when something would have happened if nobody had looked: earlier by all looks before it."""
        before = bisect_right(self.looks, moment, key=lambda look: look[0])
        return moment - (self.looks[before - 1][1] if before else 0.0)


@contextmanager
def watching(
    engine: Engine | OtherEngine, method: str, jobs: Sequence[Job], trace: TraceWriter | None, *, speculate: bool
) -> Iterator[Watch]:
    """Look at every speculative round of an engine, if there is a trace to write or a distance to compute."""
    watch = Watch()
    verifier = engine.verifier if speculate else None
    if isinstance(engine, OtherEngine) or verifier is None or (trace is None and verifier.exactness is Exactness.EXACT):
        yield watch
        return
    by_stream = {job.sampling.stream: job for job in jobs if job.sampling.stream is not None}

    def look(seen: Round) -> None:
        if seen.target_probs.is_cuda:
            torch.cuda.synchronize(seen.target_probs.device)  # else the forward would be on this clock
        begin = time.perf_counter()
        if trace is not None:
            trace.add(seen, trace_keys(seen, method, verifier.exactness, by_stream))
        if verifier.exactness is not Exactness.EXACT:
            found = distances_of(verifier, seen.tree, seen.target_probs)
            for request, distance in zip(seen.requests, found, strict=True):
                if request is not None and request.sampling.stream is not None:
                    watch.distances.setdefault(request.sampling.stream, []).append(distance)
        end = time.perf_counter()
        watch.seconds += end - begin
        watch.looks.append((end, watch.seconds))

    engine.on_round = look
    try:
        yield watch
    finally:
        engine.on_round = None
        if trace is not None:
            trace.flush()


def trace_keys(seen: Round, method: str, exactness: Exactness, jobs: Mapping[int, Job]) -> list[TraceKey | None]:
    """Return the key of each row of a batch; None for a row that did not draft or whose round ended in an error."""
    verdict = seen.verdict
    stop = torch.nn.functional.pad(verdict.path, (1, 0)).gather(1, verdict.num_accepted[:, None])[:, 0]
    kept = {"accepted": verdict.num_accepted, "expected_accepted": verdict.expected_accepted, "stop": stop}
    columns: dict[str, list[Any]] = {name: column.tolist() for name, column in kept.items()}
    columns["next_token"] = verdict.next_token.tolist()
    keys: list[TraceKey | None] = [None] * len(seen.requests)
    for row, (request, valid) in enumerate(zip(seen.requests, verdict.valid.tolist(), strict=True)):
        if request is not None and valid:
            assert request.sampling.stream is not None, "every job has a stream"
            job = jobs[request.sampling.stream]
            keys[row] = TraceKey(
                method=method,
                exactness=exactness.value,
                temperature=job.sampling.temperature,
                prompt=job.prompt.id,
                turn=job.turn,
                sample=job.sample,
                round=request.rounds,
                **{name: values[row] for name, values in columns.items()},
            )
    return keys
