"""What weights in fewer bits bring: a plain and a verify step in every quantization, beside full precision."""

import gc
from typing import Any

import torch

from experiments.bench.clock import Budget
from experiments.bench.engine.models import make_target
from experiments.bench.engine.settings import Grid, Options
from experiments.bench.engine.steps import Setting, make_runner, measure_step
from specdec.engine.engine import Engine
from specdec.machine import dtype_name, is_native
from specdec.quantization import METHODS
from specdec.requests import SamplingParams
from specdec.target.target import Target

WIDE = 9
"""Nodes of the verify step."""
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
        if budget.left <= 0:
            budget.skip(f"weights in {scheme}", "no time left")
            continue
        try:
            dtype, quantization = (dtypes[scheme], None) if scheme in dtypes else (target.dtype, scheme)
            runner = make_runner(make_target(name, target.device, dtype, quantization=quantization), sizes[0], WIDE)
        except (ValueError, ImportError, torch.OutOfMemoryError) as error:
            budget.skip(f"weights in {scheme}", str(error).split("\n", 1)[0])
            continue
        for setting in sizes:
            if budget.left <= 0:
                budget.skip(f"weights in {scheme}, {setting.nodes} nodes", "no time left")
                continue
            before, found, after = (
                measure_step(each, setting, repeats=options.repeats, limit=min(3.0, max(0.2, budget.left / 8)))
                for each in (full, runner, full)
            )
            unquantized = min(before["seconds"], after["seconds"])
            records.append(
                {"scheme": scheme, **found, "unquantized": unquantized, "ratio": unquantized / found["seconds"]}
            )
        del runner
        gc.collect()
    return records


def decode_large(device: torch.device, dtype: torch.dtype, budget: Budget) -> dict[str, Any] | None:
    """Decode a few tokens with a 70B shape in int4, where there is a GPU; returns what that took.

    The weights of the other models must have been given back before.
    """
    what = f"{LARGE} in int4"
    if "int4" not in METHODS:
        budget.skip(what, "there is no quantization of that name")
        return None
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
