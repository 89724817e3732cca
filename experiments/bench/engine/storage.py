"""Weights in fewer bits, beside full precision; and where the memory goes."""

import gc
from typing import Any

import psutil
import torch
from torch import nn

from experiments.bench.engine.settings import Grid, Options
from experiments.bench.engine.steps import CAPTURED, Setting, as_graph, make_runner, measure_step, step_batch
from experiments.bench.models import make_target
from experiments.bench.timing import Budget
from experiments.measuring.forwards import captured_at_once
from specdec.cache.base import Cache
from specdec.engine.engine import Engine
from specdec.forward import ForwardBatch
from specdec.machine import dtype_name, is_native
from specdec.requests import SamplingParams
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

WIDE = 9
"""Nodes of the verify step on quantized weights."""
LARGE = "llama-70b"
"""A shape that fits on one GPU only in few bits."""


def measure_weights(name: str, target: Target, grid: Grid, options: Options, budget: Budget) -> list[dict[str, Any]]:
    """Time one token and ``WIDE`` nodes in every scheme and 16-bit dtype, in turn with the unquantized weights.

    Args:
        name: The model's, from which quantized ones are made.
        target: The unquantized one.
        grid: Its first batch size and context are used.
        options: Which schemes.
        budget: Seconds.

    Returns:
        A record per scheme and number of nodes, with ``ratio``: the unquantized step's time over this one's.
    """
    sizes = [Setting(grid.batch[0], nodes, grid.context[0]) for nodes in (1, WIDE)]
    full = make_runner(target, sizes[0], WIDE)
    records: list[dict[str, Any]] = []
    others = [each for each in (torch.bfloat16, torch.float16) if each is not target.dtype]
    dtypes = {dtype_name(each): each for each in others if is_native(each, target.device)}
    for scheme in (*options.schemes, *dtypes):
        if budget.spent(f"weights in {scheme}"):
            continue
        try:
            dtype, quantization = (dtypes[scheme], None) if scheme in dtypes else (target.dtype, scheme)
            runner = make_runner(make_target(name, target.device, dtype, quantization=quantization), sizes[0], WIDE)
        except (ValueError, ImportError, torch.OutOfMemoryError) as error:
            budget.skip(f"weights in {scheme}", str(error).split("\n", 1)[0])
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


def decode_large(device: torch.device, dtype: torch.dtype, budget: Budget) -> dict[str, Any] | None:
    """Decode a few tokens with a 70B shape in int4, where there is a GPU; return what that took.

    The weights of the other models must have been given back before.
    """
    what = f"{LARGE} in int4"
    if budget.left < 60:
        budget.skip(what, "no time left")
        return None
    try:
        target = make_target(LARGE, device, dtype, quantization="int4")
        engine = Engine(target, max_length=128)
        tokens = engine.generate([[1, 2, 3, 4]], SamplingParams(max_new_tokens=8))[0].token_ids
        step = measure_step(engine.runner, Setting(1, 1, 16), repeats=3, limit=5.0)
    except (ValueError, ImportError, torch.OutOfMemoryError) as error:
        budget.skip(what, str(error).split("\n", 1)[0])
        return None
    return {"model": target.name, "tokens": len(tokens), **step}


def measure_memory(target: Target, grid: Grid) -> dict[str, Any]:
    """Return the bytes of a plain and a verify step at the first batch size and context.

    On a GPU, activations and what executors keep are torch's own counts. Elsewhere nobody counts tensors: activations
    are the growth of the process, which may be less than they were, and what executors keep is in there, too.
    """
    device, nodes = target.device, max(n for n in grid.nodes if n <= 64)
    setting = Setting(grid.batch[0], nodes, grid.context[0])
    resident = psutil.Process().memory_info().rss
    runner = make_runner(target, setting, nodes)
    found: dict[str, Any] = {"batch": setting.batch, "nodes": nodes, "context": setting.context}
    found |= {"weights": weight_bytes(target.model), "kv": kv_bytes(runner.cache, len(runner.facts.layers))}
    batches = [step_batch(Setting(setting.batch, n, setting.context), runner.vocab_size, device) for n in (1, nodes)]
    with captured_at_once(CAPTURED):
        for batch in batches * 4:
            runner.run(batch)
    if device.type != "cuda":
        now = psutil.Process().memory_info().rss
        activations = max(0, now - resident - found["kv"])
        return {**found, "counted": False, "graphs": None, "activations": activations, "peak": now, "reserved": None}
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
    try:
        kept = [as_graph(runner, batch) for batch in batches]
    except RuntimeError:
        torch.cuda.synchronize(runner.device)
        return None
    torch.cuda.empty_cache()
    found = torch.cuda.memory_reserved(runner.device) - before
    del kept  # until here, so that their memory is counted
    return max(0, found)


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, those that are shared once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def kv_bytes(cache: Cache, layers: int) -> int:
    """Return the bytes of a cache's memory."""
    tensors = [tensor for layer in range(layers) for tensor in cache.stored(layer) if tensor is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
