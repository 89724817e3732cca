"""What a forward over the cache costs: plain and verify steps against nodes, rows, context, backend and executor."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from experiments.bench.engine.settings import Grid
from experiments.bench.timing import Budget, timed
from experiments.measuring.forwards import Forward, captured_at_once, fill, forward_batch
from experiments.measuring.forwards import as_graph as graph_of
from specdec.attention import BACKENDS
from specdec.execution.counting import counted
from specdec.forward import ForwardBatch
from specdec.physics.bounds import Work
from specdec.physics.precision import Precision
from specdec.physics.shape import ModelShape
from specdec.physics.work import prefill_work
from specdec.physics.work import step_work as work_of_step
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

PREFILLS = (512, 128, 2048)
"""Lengths of the prompts whose prefill is timed."""

CAPTURED = 2
"""Forwards are captured when they come for this time, so that little is waited for."""


@dataclass(frozen=True)
class Setting:
    """One point of the grid.

    Attributes:
        batch: Rows.
        nodes: Nodes per row, root included; 1 is a plain step.
        context: Tokens in the cache of every row.
        attention: Name of the backend.
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
    every backend and executor at a few nodes.

    Args:
        grid: The sizes.
        invariant: Whether the invariant executor is among the executors.
    """
    base = grid.context[0]
    some = [n for n in grid.nodes if n in (1, 5, 9, 16, 64)] or list(grid.nodes[:2])
    points = [Setting(grid.batch[0], nodes, base) for nodes in grid.nodes]
    for attention in BACKENDS:
        points += [Setting(grid.batch[0], nodes, base, attention) for nodes in some]
    points += [Setting(grid.batch[0], nodes, base, optimize=False) for nodes in some]
    if invariant:
        points += [Setting(grid.batch[0], nodes, base, invariant=True) for nodes in some if nodes <= 16]
    points += [Setting(grid.batch[0], nodes, context) for context in grid.context[1:] for nodes in some[:4]]
    points += [Setting(batch, nodes, base) for batch in grid.batch[1:] for nodes in grid.nodes]
    if invariant:
        points += [Setting(batch, nodes, base, invariant=True) for batch in grid.batch[1:2] for nodes in some]
    # Where attention itself is the cost: many rows with a long context.
    wide = max((n for n in some if n <= 16), default=1)
    for batch in grid.batch[1:2]:
        points += [Setting(batch, wide, context) for context in grid.context[1:]]
    return list(dict.fromkeys(points))


def measure_steps(
    target: Target, grid: Grid, budget: Budget, *, repeats: int, invariant: bool = True
) -> list[dict[str, Any]]:
    """Time every point that the budget has room for.

    Args:
        target: The model.
        grid: The sizes.
        budget: Seconds.
        repeats: How often a point is timed, at most four times as often.
        invariant: Whether the invariant executor is measured, too.

    Returns:
        A record per point: the setting, ``seconds``, ``bytes`` (weights and KV that must move), ``flops`` and
        ``launches``.
    """
    records: list[dict[str, Any]] = []
    refused: set[str] = set()
    runner: ModelRunner | None = None
    made_for: tuple[object, ...] = ()
    for setting in settings(grid, invariant=invariant):
        if setting.attention in refused or (records and setting.attention == records[0]["backend"]):
            continue  # it cannot run, or it is what "auto" has chosen
        if budget.spent(f"step of {setting}"):
            continue
        expected = _expected(records, setting)
        if expected > budget.left / 3:
            budget.skip(f"step of {setting}", f"a forward takes some {expected:.1f} s, which is too long")
            continue
        fast = target.device.type == "cuda"
        # On a GPU whole rows are read, so they must not have room for more than this forward.
        most = setting.nodes if fast else max(grid.nodes)
        key = (*(getattr(setting, name) for name in _RUNNER), most)
        if key != made_for or runner is None:
            runner = None  # the old cache goes before the new one comes
            try:
                runner, made_for = make_runner(target, setting, most), key
            except ValueError as error:
                budget.skip(f"step of {setting}", str(error))
                made_for = ()
                if setting.attention != "auto" and "KV cache" not in str(error):
                    refused.add(setting.attention)
                continue
        if not setting.optimize and records and type(runner.executor).__name__ == records[0]["executor"]:
            continue  # there is only one way to run on this device
        try:
            records.append(measure_step(runner, setting, repeats=repeats, limit=min(4.0, budget.left / 3)))
        except torch.OutOfMemoryError:
            budget.skip(f"step of {setting}", "out of memory: lower batch or context")
    return records


_RUNNER = ("batch", "attention", "optimize", "invariant", "context")
"""What a runner is made for; it takes forwards of any number of nodes."""


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


def measure_step(runner: ModelRunner, setting: Setting, *, repeats: int, limit: float) -> dict[str, Any]:
    """Time one point; on a GPU as a CUDA graph, if the runner may optimize and the forward can be captured."""
    batch = step_batch(setting, runner.vocab_size, runner.device)
    executor, captured = type(runner.executor).__name__, None
    run: Callable[[], object] = lambda: runner.run(batch)  # noqa: E731
    if setting.optimize and not setting.invariant and runner.device.type == "cuda":
        try:
            run, executor, captured = as_graph(runner, batch), "CudaGraph", True
        except RuntimeError:  # a part of this forward cannot be captured: it is timed as it is
            torch.cuda.synchronize(runner.device)
            captured = False
    with captured_at_once(CAPTURED):
        timing = timed(run, runner.device, repeats=4 * repeats, limit=limit, warm_up=5)
    with counted() as work:
        runner.run(batch)
    needed = step_work(runner, setting)
    return {
        **asdict(setting),
        "backend": runner.attention_name,
        "executor": executor,
        "captured": is_captured(runner, setting) if captured is None else captured,
        **asdict(timing),
        "bytes": needed.bytes,
        "flops": needed.flops,
        "kv_bytes": runner.bytes_per_token * setting.batch * setting.context,
        "launches": work.launches,
        "reads": work.synchronizations,
    }


def measure_prefill(target: Target, budget: Budget, *, repeats: int) -> list[dict[str, Any]]:
    """Time the prefill of a prompt, in one piece."""
    records = []
    for tokens in PREFILLS:
        if tokens > target.max_length or budget.spent(f"prefill of {tokens} tokens"):
            continue
        runner = ModelRunner(target.model, max_batch_size=1, max_length=tokens)
        given = torch.randint(0, runner.vocab_size, (1, tokens), device=runner.device)
        batch = ForwardBatch.of_chunk(given, host_slots=np.arange(1), host_lengths=np.zeros(1, dtype=np.int64))
        timing = timed(
            lambda r=runner, b=batch: r.run(b), runner.device, repeats=repeats, limit=min(6.0, budget.left / 2)
        )
        shape = ModelShape.of(target.model.config)
        flops = prefill_work(shape, Precision(), tokens=tokens, logits=0).total.flops
        records.append({"tokens": tokens, **asdict(timing), "flops": flops, "bytes": runner.weight_bytes(tokens)})
    return records


def step_batch(setting: Setting, vocab: int, device: torch.device) -> ForwardBatch:
    """Return the forward of a setting: random tokens in a tree in which every node has two children."""
    point = Forward(batch=setting.batch, queries=setting.nodes, context=setting.context)
    return forward_batch(point, vocab, device)


def step_work(runner: ModelRunner, setting: Setting) -> Work:
    """Return what a step must move and compute: the weights once, the rows' keys and values once, and its own."""
    tokens = setting.batch * setting.nodes
    moved = runner.weight_bytes(tokens) + runner.bytes_per_token * (setting.batch * setting.context + tokens)
    shape = ModelShape.of(runner.model.config)
    work = work_of_step(shape, Precision(), batch=setting.batch, context=setting.context, drafted=setting.nodes - 1)
    return Work(moved, work.total.flops)


def as_graph(runner: ModelRunner, batch: ForwardBatch) -> Callable[[], object]:
    """Return a function that replays a forward as a CUDA graph, as the engine's rounds do.

    It has no bound of its lengths: attention reads whole rows of the cache, masked. The caches here have room for this
    forward and nothing more, so it reads the same.

    Raises:
        RuntimeError: It cannot be captured.
    """
    return graph_of(runner, replace(batch, key_bound=None))


def is_captured(runner: ModelRunner, setting: Setting) -> bool | None:
    """Return whether the executor replays a step of this size; None if it keeps no captures that one can look at."""
    recordings = getattr(runner.executor, "recordings", None)
    if recordings is None:
        return None
    return (setting.batch, setting.nodes) in {tuple(key[2][0]) for key in recordings.keys}


def _expected(records: list[dict[str, Any]], setting: Setting) -> float:
    """Return about how long a forward takes: in proportion to its tokens beyond the largest one that was timed."""
    timed_before = [record for record in records if record["context"] == setting.context] or records
    if not timed_before:
        return 0.0
    most = max(timed_before, key=lambda record: record["batch"] * record["nodes"])
    return most["seconds"] * max(1.0, setting.batch * setting.nodes / (most["batch"] * most["nodes"]))
