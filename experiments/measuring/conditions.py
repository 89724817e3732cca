"""The conditions under which an engine runs here, as cost files and comparisons state them; and its least work."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from experiments.results.manifest import device_name
from specdec.drafting.costs import Conditions
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter
from specdec.physics.costs import LeastWork
from specdec.physics.reading import read_shape
from specdec.physics.shape import ModelShape
from specdec.quantization import quantization_of
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

_NOT_COST = {"_name_or_path", "transformers_version", "architectures", "eos_token_id", "bos_token_id", "pad_token_id"}
"""Keys of a configuration that do not change the cost of a forward."""


def conditions_of(target: Target, runner: ModelRunner, drafter: Drafter | None = None) -> Conditions:
    """Return the conditions of rounds on this machine, of a target, its runner and what drafts."""
    return Conditions(
        device=device_name(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        model=target.name,
        fingerprint=_fingerprint(target),
        quantization=quantization_of(target.model),
        kv_cache=runner.kv_cache,
        attention=runner.attention_name,
        executor=type(runner.executor).__name__,
        threads=torch.get_num_threads() if target.device.type == "cpu" else 1,
        drafter=None if drafter is None else type(without_policy(drafter)).__name__,
    )


def without_policy(drafter: Drafter | None) -> Drafter | None:
    """Return the drafter beside a policy; others are returned as they are."""
    inner = getattr(drafter, "drafter", None)
    return inner if isinstance(inner, Drafter) else drafter


def _fingerprint(target: Target) -> str:
    """Return a text that is equal for targets whose forwards cost alike: of the configuration and the stored bytes."""
    kept = {name: value for name, value in target.model.config.to_dict().items() if name not in _NOT_COST}
    text = json.dumps([kept, round(target.bytes_per_weight, 4)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def shape_of(model: PreTrainedModel) -> ModelShape | None:
    """Return a model's shape; None if it is of a kind that no work is known for."""
    try:
        return read_shape(model.config)
    except (ValueError, AttributeError, TypeError, KeyError):
        return None


def least_work(target: Target, runner: ModelRunner) -> LeastWork | None:
    """Return the least work of every forward of the target; None if its shape is not known.

    Bytes are those that the runner reads, which are fewer than the model's own where it multiplies by smaller copies.
    With windows, the last positions alone are read, so that no bound follows from the others.
    """
    shape = shape_of(target.model)
    if shape is None:
        return None
    windowed = any(part.window is not None for layer in shape.layers for part in layer.attending)
    return LeastWork(
        weight_bytes=0.0 if shape.is_mixture else float(runner.weights_read().bytes),
        kv_bytes=0.0 if windowed else float(runner.cache.bytes_per_position),
        token_flops=2.0 * (shape.active_weights + shape.output_weights),
        pair_flops=0.0 if windowed else float(shape.pair_flops),
    )


def recordings_of(engine: Engine) -> dict[str, Any]:
    """Return what was recorded of an engine's rounds and how many were replayed, and what was not recorded, and why."""
    counts = engine.recording_counts
    return {"recorded": engine.recording, **asdict(counts), "replayed_share": counts.replayed_share}
