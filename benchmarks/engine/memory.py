"""Where the memory goes: weights, keys and values, activations, and what executors keep."""

from typing import Any

import psutil
import torch
from torch import nn

from benchmarks.engine.settings import Grid
from benchmarks.engine.steps import Setting, captured_at_once, make_runner, step_batch
from specdec.cache.base import Cache
from specdec.modeling.target import Target


def measure_memory(target: Target, grid: Grid) -> dict[str, Any]:
    """Returns the bytes of a plain and a verify step at the first batch size and context.

    On a GPU, activations and what executors keep are torch's own counts. Elsewhere nobody counts tensors: activations
    are the growth of the process, which may be less than they were, and what executors keep is in there, too.
    """
    device = target.device
    nodes = max(n for n in grid.nodes if n <= 64)
    setting = Setting(grid.batch[0], nodes, grid.context[0])
    resident = psutil.Process().memory_info().rss
    runner = make_runner(target, setting, nodes)
    layers = len(runner.plan.layers)
    found: dict[str, Any] = {
        "batch": setting.batch,
        "nodes": nodes,
        "context": setting.context,
        "weights": weight_bytes(target.model),
        "kv": cache_bytes(runner.cache, layers),
        "counted": device.type == "cuda",
    }
    batches = [step_batch(Setting(setting.batch, n, setting.context), runner.vocab_size, device) for n in (1, nodes)]
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with captured_at_once():
        for batch in batches:
            for _ in range(4):
                runner.run(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        kept = torch.cuda.memory_allocated(device) - before
        torch.cuda.reset_peak_memory_stats(device)
        for batch in batches:
            runner.run(batch)
        torch.cuda.synchronize(device)
        found |= {
            "graphs": kept,
            "activations": torch.cuda.max_memory_allocated(device) - before - kept,
            "peak": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
        }
    else:
        now = psutil.Process().memory_info().rss
        found |= {
            "graphs": None,
            "activations": max(0, now - resident - found["kv"]),
            "peak": now,
            "reserved": None,
        }
    return found


def weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of all parameters and buffers, those that are shared once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def cache_bytes(cache: Cache, layers: int) -> int:
    """Returns the bytes of a cache's memory."""
    storages: dict[int, int] = {}
    for layer in range(layers):
        for tensor in cache.stored(layer):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
