"""What a run does with its rounds besides running them: traces, and how far a lossy rule is from the target."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from experiments.compressed import DROPPED, pack, unpack
from experiments.divergence import Divergence, step_divergence
from experiments.jobs import Job
from experiments.trace import TraceWriter
from specdec.engine.engine import Engine
from specdec.interfaces import Round
from specdec.types import Exactness


@dataclass
class Watch:
    """What was seen of one call of the engine.

    Attributes:
        seconds: What looking has taken, which is no part of the call's time.
        divergences: Of every job's rounds, by the job's random stream; empty for an exact rule.
    """

    seconds: float = 0.0
    divergences: dict[int, list[Divergence]] = field(default_factory=dict)


@contextmanager
def watching(
    engine: Engine, method: str, jobs: Sequence[Job], trace: TraceWriter | None, *, speculate: bool
) -> Iterator[Watch]:
    """Look at every speculative round of an engine; at none if there is nothing to look for."""
    watch = Watch()
    verifier = engine.verifier if speculate else None
    if verifier is None or (trace is None and verifier.exactness is Exactness.EXACT):
        yield watch
        return
    by_stream = {job.sampling.stream: job for job in jobs if job.sampling.stream is not None}

    def look(seen: Round) -> None:
        if seen.target_probs.is_cuda:
            torch.cuda.synchronize(seen.target_probs.device)  # else the forward would be on this clock
        begin = time.perf_counter()
        if trace is not None:
            trace.add(seen, method, verifier.exactness.value, by_stream)
        if verifier.exactness is not Exactness.EXACT:
            tree, target_probs = unpack(pack(seen.tree, seen.target_probs, dropped=DROPPED))
            found = step_divergence(verifier, tree, target_probs)
            for request, divergence in zip(seen.requests, found, strict=True):
                if request is not None and request.sampling.stream is not None:
                    watch.divergences.setdefault(request.sampling.stream, []).append(divergence)
        watch.seconds += time.perf_counter() - begin

    engine.on_round = look
    try:
        yield watch
    finally:
        engine.on_round = None
        if trace is not None:
            trace.flush()
