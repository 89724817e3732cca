"""Parity of forwards by a configuration: every way to run the model in turn, and what is printed and written."""

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from experiments.config.checking import did_you_mean
from experiments.config.sections import build, component_of, listed, plain
from experiments.contenders.openai import OpenAIServer
from experiments.datasets.prompt import choose
from experiments.measuring.endpoint import through_server
from experiments.measuring.forced import TextTarget
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
from specdec.target.loading import load_tokenizer
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

PICTURE = "parity.png"
_ANY = 1 << 20
"""More tokens than any server takes; it says how many it does."""
Engines = dict[str, dict[str, Any] | None]
"""Arguments of ``ModelRunner`` by the name of a way to run the model; None for transformers' modules."""
Way = tuple[Figures, Callable[[], Iterator[Figures]]]
"""A way to run the model, and what measures it."""
_NOT_OURS = ("model", "max_batch_size", "max_length", "max_nodes", "paging", "adapters", "cache")


def parity(config: DictConfig) -> list[Figures]:
    """Compare forwards of several tokens with those of one, in every way that the configuration names."""
    engines = engines_of(config)
    settle(config)
    sections = [f"contenders.{name}" for name in config.contenders] or ["target"]
    for section in (*sections, "dataset"):
        component_of(config, section)
    out = Path(config.out)
    found: list[Figures] = []
    left: list[str] = []
    facts: dict[str, Any] = {"tokens": config.tokens, "versions": versions()}
    try:
        for each in _all_rows(config, engines, facts, left):
            found.append(each)
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


def _all_rows(config: DictConfig, engines: Engines, facts: dict[str, Any], left: list[str]) -> Iterator[Figures]:
    """Yields the figures of every way to run the model; adds to the facts, and to what is left out and why."""
    ends = time.perf_counter() + 60 * config.max_minutes
    ways = _servers(config, facts) if config.contenders else _engines(config, engines, facts)
    late: list[str] = []
    with steps_shown("forwards") as say:
        for way, rows in ways:
            said = " ".join(filter(None, [way.engine.replace("_", " "), way.dtype, way.quantization]))
            if time.perf_counter() > ends:
                late.append(said)
                continue
            say(said)
            made = rows()
            try:
                for row in made:
                    yield way | row
                    if time.perf_counter() > ends:
                        late.append(f"the rest of {said}")
                        break
            except (ValueError, RuntimeError) as error:  # the other ways go on
                left.append(f"{said} ({first_sentence(error)})")
    if late:
        left.append(f"{', '.join(late)} (max_minutes={config.max_minutes:g})")


def _engines(config: DictConfig, engines: Engines, facts: dict[str, Any]) -> Iterator[Way]:
    """This project's ways to run the target, and transformers' own."""
    facts["threads"] = torch.get_num_threads()
    prompts: Tensor | None = None
    for quantization, dtype in product(config.quantizations, config.dtypes):
        loaded = cache(partial(_target, config, dtype, quantization))

        def rows(options: dict[str, Any] | None, loaded: Callable[[], Target] = loaded) -> Iterator[Figures]:
            nonlocal prompts
            target = loaded()
            if prompts is None:
                prompts = torch.tensor(_prompts(config, target, target.max_length), device=target.device)
                facts.update(model=target.name, device=device_name(target.device), prompts=len(prompts))
            return _measured(config, target, options, prompts)

        for name, options in engines.items():
            control = options is not None and bool(options.get("invariant"))
            way = Figures(engine=name, dtype=dtype, quantization=quantization, control=control)
            yield way, partial(rows, options)


def _servers(config: DictConfig, facts: dict[str, Any]) -> Iterator[Way]:
    """Servers with OpenAI's endpoint. Of the target, only the tokenizer is loaded."""
    name = str(config.target.name)
    text = TextTarget(load_tokenizer(str(config.target.get("tokenizer") or name)), name)

    def rows(contender: str) -> Iterator[Figures]:
        server = build(config, f"contenders.{contender}")
        if not isinstance(server, OpenAIServer):
            raise ValueError(f"contenders.{contender} is no server: start it as one, and give +contender=openai")
        server.bind(text, max_batch_size=max(listed(config, "batch")), max_length=_ANY)
        prompts = _prompts(config, text, server.max_length - 1)  # a server generates one token more to rescore
        where = f"{server.model} at {server.address}"
        facts.update(model=where, prompts=len(prompts), alternatives=config.alternatives)
        given = {"tokens": config.tokens, "batches": listed(config, "batch"), "alternatives": config.alternatives}
        return through_server(server, prompts, **given)

    for contender in config.contenders:
        yield Figures(engine=contender, dtype="", quantization=None, control=False), partial(rows, contender)


def engines_of(config: DictConfig) -> Engines:
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
        raise ValueError("engines is empty: give at least one way to run the model, such as engines.specdec={}")
    if config.dataset.get("count") is not None and config.dataset.count < max(listed(config, "batch")):
        raise ValueError(
            f"batch={listed(config, 'batch')} with dataset.count={config.dataset.count}: a batch needs as many prompts"
        )
    return found


def _target(config: DictConfig, dtype: str, quantization: str | None) -> Target:
    """The target in a dtype, quantized or not. Speed does not matter here, so no scheme is refused as slow."""
    given = OmegaConf.merge(config.target, {"dtype": dtype, "quantization_check": False})
    if quantization is not None:
        given = OmegaConf.merge(given, {"quantization": quantization})
    return build(OmegaConf.create({"target": given}), "target")


def _prompts(config: DictConfig, target: Target, most: int) -> list[list[int]]:
    """The first tokens of the dataset's prompts, as many of each."""
    length, needed = config.prompt_tokens, config.prompt_tokens + config.tokens
    if needed > most:
        raise ValueError(
            f"prompt_tokens={length} and tokens={config.tokens}: {target.name} has {most} positions, give at most so "
            f"many together"
        )
    chosen, _ = choose(build(config, "dataset"))
    encoded = [encode_prompt(target.tokenizer, prompt.turns[0])[:length] for prompt in chosen]
    found = [list(ids) for ids in encoded if len(ids) == length]
    if len(found) < max(listed(config, "batch")):
        raise ValueError(
            f"prompt_tokens={length}: {len(found)} of {len(chosen)} prompts are that long, and a batch of "
            f"{max(listed(config, 'batch'))} needs as many: give fewer tokens, or a larger dataset.count"
        )
    return found


def _measured(config: DictConfig, target: Target, options: dict[str, Any] | None, prompts: Tensor) -> Iterator[Figures]:
    batches, sizes = listed(config, "batch"), listed(config, "sizes")
    begin: Begin
    if options is None:
        begin = through_model(target.model)
    else:
        length = min(config.prompt_tokens + config.tokens, target.max_length)
        room = {"max_batch_size": max(batches), "max_length": length, "max_nodes": max(sizes) - 1}
        begin = through_runner(ModelRunner(target.model, **room, **options))
    yield from measured(begin, prompts, tokens=config.tokens, batches=batches, sizes=sizes)
