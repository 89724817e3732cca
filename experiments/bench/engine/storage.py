"""Weights in fewer bits, beside full precision; and where the memory goes."""

import gc
from dataclasses import replace
from typing import Any

import psutil
import torch

from experiments.bench.engine.settings import Grid, Options
from experiments.bench.engine.steps import CAPTURED, Record, Setting, make_runner, measure_step, step_batch
from experiments.bench.models import make_target
from experiments.bench.timing import Budget
from experiments.measuring.forwards import as_graph, captured_at_once
from specdec.forward import ForwardBatch
from specdec.machine import dtype_name, is_native
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

WIDE = 9
"""Nodes of the verify step on quantized weights."""


def measure_weights(name: str, target: Target, grid: Grid, options: Options, budget: Budget) -> list[Record]:
    """Time one token and ``WIDE`` nodes in every scheme and 16-bit dtype, in turn with the unquantized weights.

    Returns:
        A record per scheme and number of nodes, with ``ratio``: the unquantized step's time over this one's.
    """
    sizes = [Setting(grid.batch[0], nodes, grid.context[0]) for nodes in (1, WIDE)]
    full = make_runner(target, sizes[0], WIDE)
    records: list[Record] = []
    others = [each for each in (torch.bfloat16, torch.float16) if each is not target.dtype]
    dtypes = {dtype_name(each): each for each in others if is_native(each, target.device)}
    for scheme in (*options.schemes, *dtypes):
        if budget.spent(f"weights in {scheme}"):
            continue
        try:
            dtype, quantization = (dtypes[scheme], None) if scheme in dtypes else (target.dtype, scheme)
            runner = make_runner(make_target(name, target.device, dtype, quantization=quantization), sizes[0], WIDE)
        except (ValueError, ImportError, torch.OutOfMemoryError) as error:
            budget.skip(f"weights in {scheme}", error)
            continue
        for setting in sizes:
            if budget.spent(f"weights in {scheme}, {setting.nodes} nodes"):
                continue
            limit = min(3.0, max(0.2, budget.left / 8))
            before, found, after = (
                measure_step(each, setting, repeats=options.repeats, limit=limit) for each in (full, runner, full)
            )
            unquantized = min(before["seconds"], after["seconds"])
            ratio = unquantized / found["seconds"]
            records.append({"scheme": scheme, **found, "unquantized": unquantized, "ratio": ratio})
        del runner
        gc.collect()
    return records


def measure_memory(target: Target, grid: Grid) -> Record:
    """Return the bytes of a plain and a verify step at the first batch size and context.

    On a GPU, activations and what executors keep are torch's own counts. Elsewhere nobody counts tensors: activations
    are the growth of the process, which may be less than they were, and what executors keep is in there, too.
    """
    device, nodes = target.device, max(n for n in grid.nodes if n <= 64)
    setting = Setting(grid.batch[0], nodes, grid.context[0])
    resident = psutil.Process().memory_info().rss
    runner = make_runner(target, setting, nodes)
    tensors = {id(each): each for each in (*target.model.parameters(), *target.model.buffers())}
    found: dict[str, Any] = {
        "batch": setting.batch,
        "nodes": nodes,
        "context": setting.context,
        "weights": sum(tensor.nbytes for tensor in tensors.values()),
        "kv": sum(tensor.nbytes for tensor in runner.cache.tensors),
    }
    batches = [step_batch(replace(setting, nodes=count), runner.vocab_size, device) for count in (1, nodes)]
    with captured_at_once(CAPTURED):
        for batch in batches * 4:
            runner.run(batch)
    if device.type != "cuda":
        peak = psutil.Process().memory_info().rss
        activations = max(0, peak - resident - found["kv"])
        return {**found, "counted": False, "graphs": None, "activations": activations, "peak": peak, "reserved": None}
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for batch in batches:
        runner.run(batch)
    torch.cuda.synchronize(device)
    return {
        **found,
        "counted": True,
        "activations": torch.cuda.max_memory_allocated(device) - before,
        "graphs": _kept_by_graphs(runner, batches),
        "peak": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
    }


def _kept_by_graphs(runner: ModelRunner, batches: list[ForwardBatch]) -> int | None:
    """Return the bytes that CUDA graphs of these forwards keep; None if they cannot be captured."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(runner.device)
    graphs = [as_graph(runner, replace(batch, key_bound=None)) for batch in batches]
    torch.cuda.empty_cache()
    found = torch.cuda.memory_reserved(runner.device) - before
    return None if None in graphs else max(0, found)
