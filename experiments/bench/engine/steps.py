"""The cost of a forward over the cache: plain and verify steps against nodes, rows, context, backend and executor."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from experiments.bench.engine.settings import Grid
from experiments.bench.timing import Budget, timed
from experiments.measuring.forwards import Forward, as_graph, captured_at_once, fill, forward_batch
from specdec.attention import BACKENDS
from specdec.counting import counted
from specdec.forward import ForwardBatch
from specdec.physics.bounds import Work
from specdec.physics.precision import Precision
from specdec.physics.reading import read_shape
from specdec.physics.work import prefill_work
from specdec.physics.work import step_work as work_of_step
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

Record = dict[str, Any]
"""Figures by name, as they are written to ``results.json``."""
PREFILLS = (512, 128, 2048)
"""Lengths of the prompts whose prefill is timed."""
CAPTURED = 2
"""Forwards are captured when they come for this time, so that little is waited for."""


@dataclass(frozen=True)
class Setting:
    """One point of the grid.

    Attributes:
        nodes: Nodes per row, root included; 1 is a plain step.
        context: Tokens in the cache of every row.
        optimize: Whether the runner may use its fast executor.
        invariant: Whether a token's logits may depend on nothing but the tokens that it sees.
    """

    batch: int
    nodes: int
    context: int
    attention: str = "auto"
    optimize: bool = True
    invariant: bool = False

    def __str__(self) -> str:
        how = ("" if self.optimize else ", not optimized") + (", invariant" if self.invariant else "")
        return f"{self.nodes} nodes x {self.batch} rows at context {self.context} (attention={self.attention}{how})"


def settings(grid: Grid, *, invariant: bool = True) -> list[Setting]:
    """Return the points of a grid, the most telling ones first.

    These are all nodes at every batch size and the first context; plain and verify steps at the other contexts; and
    every backend and executor (the invariant one if it is wanted) at a few nodes.
    """
    first, base = grid.batch[0], grid.context[0]
    some = [n for n in grid.nodes if n in (1, 5, 9, 16, 64)] or list(grid.nodes[:2])
    wide = max((n for n in some if n <= 16), default=1)
    invariants = [True] if invariant else []
    points = [Setting(first, nodes, base) for nodes in grid.nodes]
    points += [Setting(first, nodes, base, attention) for attention in BACKENDS for nodes in some]
    points += [Setting(first, nodes, base, optimize=False) for nodes in some]
    points += [Setting(first, nodes, base, invariant=on) for on in invariants for nodes in some if nodes <= 16]
    points += [Setting(first, nodes, context) for context in grid.context[1:] for nodes in some[:4]]
    points += [Setting(batch, nodes, base) for batch in grid.batch[1:] for nodes in grid.nodes]
    for batch in grid.batch[1:2]:
        points += [Setting(batch, nodes, base, invariant=on) for on in invariants for nodes in some]
        # Where attention itself is the cost: many rows with a long context.
        points += [Setting(batch, wide, context) for context in grid.context[1:]]
    return list(dict.fromkeys(points))


def measure_steps(target: Target, grid: Grid, budget: Budget, *, repeats: int, invariant: bool = True) -> list[Record]:
    """Time every point that the budget has room for, each at most ``4 * repeats`` times; return a record per point."""
    records: list[Record] = []
    refused: set[str] = set()
    runner: ModelRunner | None = None
    made_for: Setting | None = None
    for setting in settings(grid, invariant=invariant):
        what = f"step of {setting}"
        if setting.attention in refused or (records and setting.attention == records[0]["backend"]):
            continue  # it cannot run, or it is what "auto" has chosen
        if budget.spent(what):
            continue
        expected = _expected(records, setting)
        if expected > budget.left / 3:
            budget.skip(what, f"a forward takes some {expected:.1f} s, which is too long")
            continue
        # On a GPU whole rows are read, so they must not have room for more than this forward.
        most = setting.nodes if target.device.type == "cuda" else max(grid.nodes)
        key = replace(setting, nodes=most)
        if key != made_for or runner is None:
            runner, made_for = None, None  # the old cache goes before the new one comes
            try:
                runner, made_for = make_runner(target, setting, most), key
            except ValueError as error:
                budget.skip(what, error)
                if setting.attention != "auto" and "KV cache" not in str(error):
                    refused.add(setting.attention)
                continue
        if not setting.optimize and records and type(runner.executor).__name__ == records[0]["executor"]:
            continue  # there is only one way to run on this device
        try:
            records.append(measure_step(runner, setting, repeats=repeats, limit=min(4.0, budget.left / 3)))
        except torch.OutOfMemoryError:
            budget.skip(what, "out of memory: lower batch or context")
    return records


def make_runner(target: Target, setting: Setting, nodes: int) -> ModelRunner:
    """Return a runner whose cache is full of random keys and values.

    Raises:
        ValueError: The backend does not take the model, or the cache does not fit.
    """
    runner = ModelRunner(
        target.model,
        max_batch_size=setting.batch,
        max_length=setting.context,
        max_nodes=nodes,
        attention=setting.attention,
        optimize=setting.optimize,
        invariant=setting.invariant,
    )
    fill(runner)
    return runner


def measure_step(runner: ModelRunner, setting: Setting, *, repeats: int, limit: float) -> Record:
    """Time one point; on a GPU as a CUDA graph, if the runner may optimize and the forward can be captured.

    Returns:
        The setting, the figures of ``timed``, ``bytes`` (weights and KV that must move), ``flops`` and ``launches``.
    """
    batch = step_batch(setting, runner.vocab_size, runner.device)
    # Without a bound of its lengths, attention reads whole rows of the cache, masked. The caches here have room for
    # this forward and nothing more, so it reads the same.
    tried = setting.optimize and not setting.invariant and runner.device.type == "cuda"
    graph = as_graph(runner, replace(batch, key_bound=None)) if tried else None
    with captured_at_once(CAPTURED):
        run = graph or (lambda: runner.run(batch))
        timing = timed(run, runner.device, repeats=4 * repeats, limit=limit, warm_up=5)
    with counted() as work:
        runner.run(batch)
    needed = step_work(runner, setting)
    return {
        **asdict(setting),
        "backend": runner.attention_name,
        "executor": type(runner.executor).__name__ if graph is None else "CudaGraph",
        "captured": graph is not None if tried else is_captured(runner, setting),
        **timing,
        "bytes": needed.bytes,
        "flops": needed.flops,
        "kv_bytes": runner.bytes_per_token * setting.batch * setting.context,
        "launches": work.launches,
        "reads": work.synchronizations,
    }


def measure_prefill(target: Target, budget: Budget, *, repeats: int) -> list[Record]:
    """Time the prefill of a prompt, in one piece."""
    records = []
    for tokens in PREFILLS:
        if tokens > target.max_length or budget.spent(f"prefill of {tokens} tokens"):
            continue
        runner = ModelRunner(target.model, max_batch_size=1, max_length=tokens)
        given = torch.randint(0, runner.vocab_size, (1, tokens), device=runner.device)
        batch = ForwardBatch.of_chunk(given, host_slots=np.arange(1), host_lengths=np.zeros(1, dtype=np.int64))
        limit = min(6.0, budget.left / 2)
        timing = timed(lambda r=runner, b=batch: r.run(b), runner.device, repeats=repeats, limit=limit)
        shape = read_shape(target.model.config)
        flops = prefill_work(shape, Precision(), tokens=tokens, logits=0).total.flops
        records.append({"tokens": tokens, **timing, "flops": flops, "bytes": runner.weight_bytes(tokens)})
    return records


def step_batch(setting: Setting, vocab: int, device: torch.device) -> ForwardBatch:
    """Return the forward of a setting: random tokens in a tree in which every node has two children."""
    point = Forward(batch=setting.batch, queries=setting.nodes, context=setting.context)
    return forward_batch(point, vocab, device)


def step_work(runner: ModelRunner, setting: Setting) -> Work:
    """Return what a step must move and compute: the weights once, the rows' keys and values once, and its own."""
    tokens = setting.batch * setting.nodes
    moved = runner.weight_bytes(tokens) + runner.bytes_per_token * (setting.batch * setting.context + tokens)
    shape = read_shape(runner.model.config)
    work = work_of_step(shape, Precision(), batch=setting.batch, context=setting.context, drafted=setting.nodes - 1)
    return Work(moved, work.total.flops)


def is_captured(runner: ModelRunner, setting: Setting) -> bool | None:
    """Return whether the executor replays a step of this size; None if it keeps no captures that one can look at."""
    recordings = getattr(runner.executor, "recordings", None)
    return None if recordings is None else (setting.batch, setting.nodes) in {tuple(k[2][0]) for k in recordings.keys}


def _expected(records: list[Record], setting: Setting) -> float:
    """Return about how long a forward takes: in proportion to its tokens beyond the largest one that was timed."""
    timed_before = [record for record in records if record["context"] == setting.context] or records
    if not timed_before:
        return 0.0
    most = max(timed_before, key=lambda record: record["batch"] * record["nodes"])
    return most["seconds"] * max(1.0, setting.batch * setting.nodes / (most["batch"] * most["nodes"]))
