"""Where the memory goes: weights, keys and values, activations, and what executors keep."""

from typing import Any

import psutil
import torch
from torch import nn

from experiments.bench.engine.settings import Grid
from experiments.bench.engine.steps import CAPTURED, Setting, as_graph, make_runner, step_batch
from experiments.measuring.forwards import captured_at_once
from specdec.cache.base import Cache
from specdec.forward import ForwardBatch
from specdec.target.runner import ModelRunner
from specdec.target.target import Target


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
        "kv": kv_bytes(runner.cache, layers),
        "counted": device.type == "cuda",
    }
    batches = [step_batch(Setting(setting.batch, n, setting.context), runner.vocab_size, device) for n in (1, nodes)]
    with captured_at_once(CAPTURED):
        for batch in batches:
            for _ in range(4):
                runner.run(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        for batch in batches:
            runner.run(batch)
        torch.cuda.synchronize(device)
        found |= {
            "activations": torch.cuda.max_memory_allocated(device) - before,
            "graphs": _kept_by_graphs(runner, batches),
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


def _kept_by_graphs(runner: ModelRunner, batches: list[ForwardBatch]) -> int | None:
    """Returns the bytes that CUDA graphs of these forwards keep; None if they cannot be captured."""
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
    """Returns the bytes of all parameters and buffers, those that are shared once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def kv_bytes(cache: Cache, layers: int) -> int:
    """Returns the bytes of a cache's memory."""
    storages: dict[int, int] = {}
    for layer in range(layers):
        for tensor in cache.stored(layer):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
