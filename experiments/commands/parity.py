"""Parity of forwards by a configuration: every way to run the model in turn, and what is printed and written."""

import time
from collections.abc import Iterator
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from experiments.config.checking import did_you_mean
from experiments.config.sections import build, component_of, listed, plain
from experiments.datasets.prompt import choose
from experiments.measuring.parity import Begin, through_model, through_runner
from experiments.measuring.parity import parity as measured
from experiments.reporting.formats import publish
from experiments.reporting.parity import parity_plot, parity_table, remarks
from experiments.reporting.progress import steps_shown
from experiments.results.frame import Figures
from experiments.results.manifest import device_name, versions
from experiments.session.engines import settle
from specdec.engine.text import encode_prompt
from specdec.origin import first_sentence
from specdec.quantization import check_quantization
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

PICTURE = "parity.png"
_NOT_OURS = ("model", "max_batch_size", "max_length", "max_nodes", "paging", "adapters", "cache")


def parity(config: DictConfig) -> list[Figures]:
    """Compare forwards of several tokens with those of one, in every way that the configuration names."""
    engines = engines_of(config)
    settle(config)
    for section in ("target", "dataset"):
        component_of(config, section)
    out = Path(config.out)
    found: list[Figures] = []
    left: list[str] = []
    facts: dict[str, Any] = {"tokens": config.tokens, "threads": torch.get_num_threads(), "versions": versions()}
    try:
        for each in _all_ways(config, engines, facts, left):
            found += each
    finally:  # Ctrl-C keeps what was measured
        if found:
            publish(
                out,
                "parity",
                tables=[parity_table(found, facts)],
                figures={**facts, "left_out": left, "rows": found},
                said=remarks(found, left),
                drawn=lambda: [parity_plot(found, out / PICTURE, facts)],
            )
    if not found:
        raise ValueError(f"nothing was measured: {'; '.join(left)}")
    return found


def _all_ways(
    config: DictConfig, engines: dict[str, dict[str, Any] | None], facts: dict[str, Any], left: list[str]
) -> Iterator[list[Figures]]:
    """Yields the figures of every way to run the model; adds to the facts, and to what is left out and why."""
    ends = time.perf_counter() + 60 * config.max_minutes
    with steps_shown("forwards") as say:
        for quantization, dtype in product(config.quantizations, config.dtypes):
            target: Target | None = None
            for name, options in engines.items():
                way = Figures(engine=name, dtype=dtype, quantization=quantization, control=_is_control(options))
                said = " ".join(filter(None, [name, dtype, quantization]))
                if time.perf_counter() > ends:
                    left.append(f"{said} (max_minutes={config.max_minutes:g})")
                    continue
                target = target or _target(config, dtype, quantization)
                prompts = _prompts(config, target)
                facts.setdefault("model", target.name)
                facts |= {"device": device_name(target.device), "prompts": len(prompts)}
                say(said)
                try:
                    yield [way | each for each in _measured(config, target, options, prompts)]
                except ValueError as error:  # this model cannot be run so; the other ways go on
                    left.append(f"{said} ({first_sentence(error)})")


def engines_of(config: DictConfig) -> dict[str, dict[str, Any] | None]:
    """Returns the ways to run the model, as the section ``engines`` has them; refuses what a runner does not take."""
    known = [name for name in signature(ModelRunner).parameters if name not in _NOT_OURS]
    found = plain(config, "engines")
    for name, options in found.items():
        for option in options or {}:
            if option not in known:
                raise ValueError(f"engines.{name}: there is no {option}{did_you_mean(option, known)}")
    for scheme in filter(None, config.quantizations):
        check_quantization(scheme)
    if not found:
        raise ValueError("engines is empty: give at least one way to run the model, such as engines.auto={}")
    if config.dataset.get("count") is not None and config.dataset.count < max(listed(config, "batch")):
        raise ValueError(
            f"batch={listed(config, 'batch')} with dataset.count={config.dataset.count}: a batch needs as many prompts"
        )
    return found


def _is_control(options: dict[str, Any] | None) -> bool:
    return options is not None and bool(options.get("invariant"))


def _target(config: DictConfig, dtype: str, quantization: str | None) -> Target:
    """The target in a dtype, quantized or not. Speed does not matter here, so no scheme is refused as slow."""
    given = OmegaConf.merge(config.target, {"dtype": dtype, "quantization_check": False})
    if quantization is not None:
        given = OmegaConf.merge(given, {"quantization": quantization})
    return build(OmegaConf.create({"target": given}), "target")


def _prompts(config: DictConfig, target: Target) -> Tensor:
    """The first tokens of the dataset's prompts, as many of each."""
    length, needed = config.prompt_tokens, config.prompt_tokens + config.tokens
    if needed > target.max_length:
        raise ValueError(
            f"prompt_tokens={length} and tokens={config.tokens}: {target.name} has {target.max_length} positions, "
            f"give at most so many together"
        )
    chosen, _ = choose(build(config, "dataset"))
    encoded = [encode_prompt(target.tokenizer, prompt.turns[0])[:length] for prompt in chosen]
    found = [ids for ids in encoded if len(ids) == length]
    if len(found) < max(listed(config, "batch")):
        raise ValueError(
            f"prompt_tokens={length}: {len(found)} of {len(chosen)} prompts are that long, and a batch of "
            f"{max(listed(config, 'batch'))} needs as many: give fewer tokens, or a larger dataset.count"
        )
    return torch.tensor(found, device=target.device)


def _measured(config: DictConfig, target: Target, options: dict[str, Any] | None, prompts: Tensor) -> Iterator[Figures]:
    batches, sizes = listed(config, "batch"), listed(config, "sizes")
    begin: Begin
    if options is None:
        begin = through_model(target.model)
    else:
        length = min(config.prompt_tokens + config.tokens, target.max_length)
        room = {"max_batch_size": max(batches), "max_length": length, "max_nodes": max(sizes) - 1}
        begin = through_runner(ModelRunner(target.model, **room, **options))
    return measured(begin, prompts, tokens=config.tokens, batches=batches, sizes=sizes)
