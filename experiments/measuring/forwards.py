"""Times of the target's forwards, over a grid of rows, contexts and nodes, and over pieces of prompts.

All points are timed in turn, in another order in every pass, until the time is up. So whatever else the machine does
meets all of them alike, and a point counts with the lower quartile of its times.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from scipy import stats

from experiments.measuring.rounds import now
from specdec.drafting.costs import smallest
from specdec.forward import ForwardBatch, bucket_of
from specdec.physics.costs import StepSize
from specdec.shape import TreeShape
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree

LEAST_PASSES = 3
"""Passes over all points that are made even if they take longer than the time that was given."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One point: rows, tokens per row (nodes with the root, or a piece of a prompt), positions in every row's cache.

    Attributes:
        held_out: Whether it is kept out of the fit, to see how well that predicts.
    """

    batch: int
    queries: int
    context: int
    prompt: bool = False
    held_out: bool = False

    @property
    def size(self) -> StepSize:
        return StepSize.of(rows=self.batch, queries=self.queries, context=self.context)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The points of a calibration: all combinations of rows, positions in the cache and drafted nodes per row.

    ``chunk`` has the lengths of pieces of prompts, which are timed in one row.
    """

    batch: Sequence[int]
    context: Sequence[int]
    drafted: Sequence[int]
    chunk: Sequence[int] = ()

    def forwards(self, *, held_out: bool = False) -> list[Forward]:
        """Return the points. Pieces of prompts stand behind nothing and behind the shorter contexts."""
        rounds = product(self.batch, [nodes + 1 for nodes in self.drafted], self.context, [False])
        before = sorted({0, *self.context[:-1]}) if not held_out else sorted(self.context)
        return [
            Forward(batch=batch, queries=queries, context=context, prompt=prompt, held_out=held_out)
            for batch, queries, context, prompt in (*rounds, *product([1], self.chunk, before, [True]))
        ]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A point that was timed: the lower quartile of its times, their number, and how they vary (``noise_spread``)."""

    forward: Forward
    seconds: float
    passes: int
    spread: float = 0.0


def measure_forwards(
    runner: ModelRunner,
    points: Sequence[Forward],
    *,
    seconds: float,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Timed]:
    """Return the times of some forwards, measured for about ``seconds``, and in at least ``LEAST_PASSES`` passes."""
    fill(runner)
    random = np.random.default_rng(seed)
    times: dict[Forward, list[float]] = {point: [] for point in points}
    began = time.perf_counter()
    with runner.executor.at_first_sight():
        calls = {point: _call(runner, point) for point in points}
        for number, point in enumerate(points):
            progress(f"warming up: forward {number + 1} of {len(points)}")
            calls[point]()  # captures it, chooses kernels; a quartile of times leaves out what is slow once more
        passes = 0
        while passes < LEAST_PASSES or time.perf_counter() - began < seconds:
            for index in random.permutation(len(points)):
                point = points[index]
                start = now(runner.device)
                calls[point]()
                times[point].append(now(runner.device) - start)
            passes += 1
            progress(f"forwards: pass {passes}, {max(0.0, seconds - time.perf_counter() + began):.0f} s left")
    spread = {point: float(0.7413 * stats.iqr(took) / np.median(took)) for point, took in times.items()}
    return [Timed(forward=p, seconds=smallest(took), passes=passes, spread=spread[p]) for p, took in times.items()]


def forward_batch(point: Forward, vocab: int, device: torch.device) -> ForwardBatch:
    """Return a forward of random tokens: a piece of a prompt, or a tree in which every node has two children."""
    tokens = torch.randint(0, vocab, (point.batch, point.queries), device=device)
    slots, lengths = np.arange(point.batch), np.full(point.batch, point.context)
    if point.prompt:
        return ForwardBatch.of_chunk(tokens, host_slots=slots, host_lengths=lengths)
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, point.queries):
        paths.append((*paths[(node - 1) // 2], (node - 1) % 2))
    shape = TreeShape.from_paths(paths[1:]) if paths[1:] else None
    tree = DraftTree.root_only(tokens[:, 0]) if shape is None else DraftTree.from_shape(shape, tokens)
    return ForwardBatch.of_tree(tree, host_slots=slots, host_lengths=lengths)


def fill(runner: ModelRunner) -> None:
    """Write random numbers into all of a runner's cache: zeros are not what a device usually reads."""
    with torch.inference_mode():
        for tensor in runner.cache.tensors:
            if tensor.is_floating_point() and tensor.element_size() > 1:
                tensor.normal_() if tensor.shape[-1] > 1 else tensor.fill_(0.01)  # the factors of codes
            elif tensor.dtype in (torch.int8, torch.uint8):
                tensor.random_(0, 100)


def _call(runner: ModelRunner, point: Forward) -> Callable[[], object]:
    """Return a function that runs a point as rounds do: on a GPU as a CUDA graph, if it can be captured."""
    batch, states, graph = forward_batch(point, runner.vocab_size, runner.device), runner.cache.states, None
    if not point.prompt:
        if runner.device.type == "cuda":  # a recorded round reads a number of positions that is rounded up
            batch = replace(batch, key_bound=bucket_of(point.context + point.queries))
        graph = as_graph(runner, batch)

    def run() -> None:
        if states is not None:
            states.pretend(batch.slots, batch.lengths)
        runner.run(batch)

    return graph or run


def as_graph(runner: ModelRunner, batch: ForwardBatch) -> Callable[[], object] | None:
    """Return a function that replays a forward as a CUDA graph, as rounds do; None if it cannot be one."""
    return None if runner.invariant else graphed(lambda: runner.run(batch), runner.device)


def graphed(call: Callable[[], object], device: torch.device) -> Callable[[], object] | None:
    """Return a function that replays a call as a CUDA graph; None on another device, or if it cannot be one."""
    if device.type != "cuda":
        return None
    for _ in range(3):  # chooses kernels, and fills what is computed once per topology
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.inference_mode(), torch.cuda.graph(graph):
            kept = call()
    except RuntimeError:  # a part of it cannot be captured
        torch.cuda.synchronize(device)
        return None

    def replayed() -> object:
        graph.replay()
        return kept

    return replayed
