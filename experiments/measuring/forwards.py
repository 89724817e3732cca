"""Times of the target's forwards, over a grid of rows, contexts and nodes, and over pieces of prompts.

All points are timed in turn, in another order in every pass, until the time is up. So whatever else the machine does
meets all of them alike, and a point counts with the lower quartile of its times.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from specdec.cache.base import Cache
from specdec.drafting.costs import smallest
from specdec.execution import replay
from specdec.forward import ForwardBatch, bucket_of
from specdec.physics.step_cost import StepSize
from specdec.shape import TreeShape
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree

LEAST_PASSES = 3
"""Passes over all points that are made even if they take longer than the time that was given."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One point.

    Attributes:
        batch: Rows.
        queries: Tokens per row: nodes with the root, or a piece of a prompt.
        context: Positions in every row's cache.
        prompt: Whether it is a piece of a prompt, whose logits are not computed.
        held_out: Whether it is kept out of the fit, to see how well that predicts.
    """

    batch: int
    queries: int
    context: int
    prompt: bool = False
    held_out: bool = False

    @property
    def size(self) -> StepSize:
        """The sizes that its time depends on."""
        return StepSize.of(rows=self.batch, queries=self.queries, context=self.context)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The points of a calibration: all combinations of some sizes.

    Attributes:
        batch: Numbers of rows.
        context: Positions in every row's cache.
        drafted: Drafted nodes per row.
        chunk: Lengths of pieces of prompts.
    """

    batch: Sequence[int]
    context: Sequence[int]
    drafted: Sequence[int]
    chunk: Sequence[int] = ()

    def forwards(self, *, held_out: bool = False) -> list[Forward]:
        """Returns the points. Pieces of prompts are of one row, behind nothing and behind the shorter contexts."""
        rounds = [
            Forward(batch=batch, queries=nodes + 1, context=context, held_out=held_out)
            for batch in self.batch
            for nodes in self.drafted
            for context in self.context
        ]
        before = sorted({0, *self.context[:-1]}) if not held_out else sorted(self.context)
        prompts = [
            Forward(batch=1, queries=chunk, context=context, prompt=True, held_out=held_out)
            for chunk in self.chunk
            for context in before
        ]
        return rounds + prompts


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A point that was timed.

    Attributes:
        forward: The point.
        seconds: The lower quartile of its times.
        passes: How often it was timed.
        drift: Its time in the later half of the passes over that in the earlier half.
    """

    forward: Forward
    seconds: float
    passes: int
    drift: float = 1.0


def measure_forwards(
    runner: ModelRunner,
    points: Sequence[Forward],
    *,
    seconds: float,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Timed]:
    """Returns how long some forwards take.

    Args:
        runner: The target over a cache that is large enough.
        points: What to time.
        seconds: About how long to measure; at least three passes are made.
        seed: Of the order.
        progress: Called with how far it is.
    """
    fill(runner)
    random = np.random.default_rng(seed)
    times: dict[Forward, list[float]] = {point: [] for point in points}
    began = time.perf_counter()
    with captured_at_once():
        calls = {point: _call(runner, point) for point in points}
        for number, point in enumerate(points):
            for _ in range(2):  # captures it, chooses kernels
                calls[point]()
            progress(f"warming up: forward {number + 1} of {len(points)}")
        passes = 0
        while passes < LEAST_PASSES or time.perf_counter() - began < seconds:
            for index in random.permutation(len(points)):
                point = points[index]
                start = _now(runner.device)
                calls[point]()
                times[point].append(_now(runner.device) - start)
            passes += 1
            progress(f"forwards: pass {passes}, {max(0.0, seconds - time.perf_counter() + began):.0f} s left")
    return [_timed(point, found) for point, found in times.items()]


def _timed(point: Forward, seconds: Sequence[float]) -> Timed:
    half = len(seconds) // 2
    drift = smallest(seconds[-half:]) / smallest(seconds[:half])
    return Timed(forward=point, seconds=smallest(seconds), passes=len(seconds), drift=drift)


def forward_batch(point: Forward, vocab: int, device: torch.device) -> ForwardBatch:
    """Returns a forward of random tokens: a piece of a prompt, or a tree in which every node has two children."""
    tokens = torch.randint(0, vocab, (point.batch, point.queries), device=device)
    slots, lengths = np.arange(point.batch), np.full(point.batch, point.context)
    if point.prompt:
        return ForwardBatch.of_chunk(tokens, host_slots=slots, host_lengths=lengths)
    if point.queries == 1:
        tree = DraftTree.root_only(tokens[:, 0])
    else:
        tree = DraftTree.from_shape(_binary(point.queries), tokens)
    return ForwardBatch.of_tree(tree, host_slots=slots, host_lengths=lengths)


def _binary(nodes: int) -> TreeShape:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, nodes):
        paths.append((*paths[(node - 1) // 2], (node - 1) % 2))
    return TreeShape.from_paths(paths[1:])


def fill(runner: ModelRunner) -> None:
    """Write random numbers into all of a runner's cache: zeros are not what a device usually reads."""
    cache: Cache = runner.cache
    with torch.inference_mode():
        for layer in range(len(runner.facts.layers)):
            for tensor in cache.stored(layer):
                if tensor is None:
                    continue
                if tensor.is_floating_point() and tensor.element_size() > 1:
                    tensor.normal_() if tensor.ndim == 4 else tensor.fill_(0.01)
                elif tensor.dtype in (torch.int8, torch.uint8):
                    tensor.random_(0, 100)


@contextmanager
def captured_at_once(after: int = 1) -> Iterator[None]:
    """During the ``with`` block, a forward is captured when it comes for the first time, as it is in a long run.

    What is captured, and what a replay costs, is the same.

    Args:
        after: It is captured when it comes for this time; 2 spares the work for sizes that come once.
    """
    before = replay.CAPTURE_AFTER
    replay.CAPTURE_AFTER = after
    try:
        yield
    finally:
        replay.CAPTURE_AFTER = before


def _call(runner: ModelRunner, point: Forward) -> Callable[[], object]:
    """Returns a function that runs a point as rounds do: on a GPU as a CUDA graph, if it can be captured."""
    batch = forward_batch(point, runner.vocab_size, runner.device)
    if runner.device.type != "cuda" or point.prompt or runner.invariant:
        return lambda: runner.run(batch)
    # A recorded round reads a number of positions that is rounded up.
    batch = replace(batch, key_bound=bucket_of(point.context + point.queries))
    try:
        return as_graph(runner, batch)
    except RuntimeError:  # a part of this forward cannot be captured: it is timed as it is
        torch.cuda.synchronize(runner.device)
        return lambda: runner.run(batch)


def as_graph(runner: ModelRunner, batch: ForwardBatch) -> Callable[[], object]:
    """Returns a function that replays a forward as a CUDA graph, as the engine's rounds do.

    Args:
        runner: Runs it.
        batch: A forward whose lengths the host does not know.

    Raises:
        RuntimeError: It cannot be captured.
    """
    for _ in range(3):  # chooses kernels, and fills what is computed once per topology
        runner.run(batch)
    torch.cuda.synchronize(runner.device)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        kept = runner.run(batch)

    def replayed() -> object:
        graph.replay()
        return kept

    return replayed


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
