"""Is this machine fast enough for what a command is about to do?"""

import time

import torch
from omegaconf import DictConfig

from experiments.config.sections import build
from experiments.measuring.jobs import prepare
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target

_TRIED = 12
"""Tokens that are decoded to find out; as many again warm up."""

_PER_METHOD = 0.8
"""What a drafting method takes of plain decoding's time, in the mean over temperatures; a guess on the safe side."""


def seconds_needed(config: DictConfig) -> float:
    """The seconds that a measurement with this configuration would take, estimated from a few tokens of plain decoding.

    Args:
        config: With the sections of ``conf/demo.yaml``.
    """
    target: Target = build(config, "target")
    engine = Engine(target, max_length=int(config.engine.max_length or 512))
    dataset = build(config, "dataset")
    assert target.tokenizer is not None
    jobs, _ = prepare(dataset.load()[:1], SamplingParams(max_new_tokens=_TRIED), target.tokenizer, max_length=512)
    engine.generate([jobs[0].prompt_ids], jobs[0].sampling)
    begin = time.perf_counter()
    done = engine.generate([jobs[0].prompt_ids], jobs[0].sampling)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    per_token = (time.perf_counter() - begin) / max(1, len(done[0].token_ids))
    prompts = int(config.dataset.count) + int(config.warmup_prompts)
    tokens = prompts * int(config.sampling.max_new_tokens) * len(config.temperatures)
    return per_token * tokens * (1 + _PER_METHOD * len(config.methods))


def fit_to_machine(config: DictConfig) -> str | None:
    """Take the model at its own size where the larger cost is too much for this machine.

    Args:
        config: With the sections of ``conf/demo.yaml``; ``target.inflate`` is set to null where it is too much.

    Returns:
        A sentence on what was changed and why; None if nothing was.
    """
    limit, size = config.time_limit, config.target.inflate
    if limit is None or size is None:
        return None
    needed = seconds_needed(config)
    if needed <= limit:
        return None
    config.target.inflate = None
    return (
        f"At the cost of a {size} model this would take about {needed:.0f} s here, more than time_limit={limit:g}: "
        f"{config.target.name} runs at its own size instead, where a forward is so short that drafting hardly pays"
    )
