"""Ingredients of a method's speed, in words: a comparison has to state them of both sides."""

import torch

from experiments.contenders.base import OtherEngine
from experiments.measuring.conditions import drafter_name
from experiments.measuring.measure import Contender
from experiments.results.ingredients import NO_DRAFTER
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter
from specdec.quantization import quantization_of


def ingredients_of(contender: Contender) -> dict[str, str]:
    """Returns the ingredients of a method by name, as ``experiments.results.ingredients.LEVERS`` has them.

    Of another engine, only the name is known.
    """
    engine = contender.engine
    if isinstance(engine, OtherEngine):
        return {"engine": type(engine).__name__}
    runner, target = engine.runner, engine.target
    dtype = str(target.dtype).removeprefix("torch.")
    return {
        "target": target.name.removesuffix(f" in {quantization_of(target.model)}"),
        "attention": runner.attention_name,
        "forwards": _forwards(engine),
        "weights": quantization_of(target.model) or dtype,
        "dtype": dtype,
        "KV cache": runner.kv_cache or dtype,
        "drafter": _drafter(engine.drafter if contender.speculate else None),
        "batch": str(engine.max_batch_size),
        "threads": str(torch.get_num_threads()),
    }


def _forwards(engine: Engine) -> str:
    """The way in which forwards and rounds are run."""
    parts = ["packed", "captured"] if engine.runner.executor.captures else []
    if engine.recording != "off":
        parts.append(f"{engine.recording} recorded")
    if engine.runner.invariant:
        parts.append("invariant")
    return ", ".join(parts) or "the model's own code"


def _drafter(drafter: Drafter | None) -> str:
    name = drafter_name(drafter)
    if drafter is None or name is None:
        return NO_DRAFTER
    return f"{name.removesuffix('Drafter')}, up to {drafter.max_nodes} tokens"
