"""Parity of forwards by a configuration: every way to run the model in turn, and what is printed and written."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from experiments.config import job
from experiments.config.checking import did_you_mean
from experiments.config.pairs import check_files
from experiments.config.sections import build, component_of, listed, plain, plain_whole
from experiments.contenders.openai import OpenAIServer
from experiments.datasets.prompt import choose
from experiments.measuring.endpoint import through_server
from experiments.measuring.forced import TextTarget
from experiments.measuring.judged import judged
from experiments.measuring.parity import Cell, through_model, through_runner
from experiments.measuring.parity import parity as measured
from experiments.reporting.best_tree import written_shape
from experiments.reporting.formats import publish
from experiments.reporting.parity import drafts_table, parity_plot, parity_table, remarks
from experiments.reporting.progress import steps_shown
from experiments.results.frame import Figures
from experiments.results.kept import keep_row, kept_rows
from experiments.results.manifest import check_facts, device_name, note_in_manifest, versions, write_manifest
from experiments.results.statistics import Bootstrap
from experiments.session.engines import settle
from experiments.session.resume import begun
from specdec.engine.engine import Engine
from specdec.engine.text import encode_prompt
from specdec.interfaces import Drafter
from specdec.origin import first_sentence
from specdec.placement import device_of_map
from specdec.quantization import check_quantization
from specdec.requests import SamplingParams
from specdec.shape import TreeShape
from specdec.target.loading import load_tokenizer, resolve_device
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from verifiers.rejection import RejectionVerifier

PICTURE, ROWS = "parity.png", "rows.jsonl"
_ANY = 1 << 20
"""More tokens than any server takes; it says how many it does."""
Engines = dict[str, dict[str, Any] | None]
"""Arguments of ``ModelRunner`` by the name of a way to run the model; None for transformers' modules."""
Way = tuple[Figures, Callable[[list[Figures]], Iterator[Figures]]]
"""A way to run the model, and what measures the rest of it, given the rows that are there."""
_NOT_OURS = ("model", "max_batch_size", "max_length", "max_nodes", "paging", "adapters", "cache")


def parity(config: DictConfig) -> list[Figures]:
    """Compare forwards of several tokens with those of one, in every way that the configuration names."""
    before = begun(config, kind="comparison", begins=ROWS)
    engines, cells = engines_of(config), cells_of(config)
    settle(config)
    sections = [f"contenders.{name}" for name in config.contenders] or ["target"]
    for section in (*sections, "dataset", "drafter"):
        component_of(config, section)
    check_files(config)
    out = Path(config.out)
    if before is None:
        write_manifest(out, plain_whole(config))
    late: dict[str, list[str]] = {}
    facts: dict[str, Any] = (before or {}).get("facts") or {"tokens": config.tokens, "versions": versions()}
    if not config.contenders:
        here = {"threads": torch.get_num_threads(), "device": _device(config)}
        check_facts(facts | facts["versions"], out, **versions(), **here)
        facts.update(here)
    found = kept_rows(out / ROWS)
    ways = _servers(config, facts) if config.contenders else _engines(config, engines, cells, facts)
    try:
        for row in _all_rows(config, ways, list(found), late):
            keep_row(out / ROWS, row)
            found.append(row)
    finally:  # Ctrl-C keeps what was measured
        left = [f"{', '.join(ways)} ({why})" for why, ways in late.items()]
        if found:
            publish(
                out,
                "parity",
                tables=[parity_table(found, facts), *drafts_table(found, facts)],
                figures={**facts, "left_out": left, "rows": found},
                said=remarks(found, left),
                drawn=lambda: [parity_plot(found, out / PICTURE, facts)],
            )
    if not found:
        raise ValueError(f"nothing was measured: {'; '.join(left)}")
    return found


def _all_rows(
    config: DictConfig, ways: Iterator[Way], kept: list[Figures], late: dict[str, list[str]]
) -> Iterator[Figures]:
    """Yields the figures of every way to run the model that are not kept; adds what is left out, by the reason."""
    ends = time.perf_counter() + 60 * config.max_minutes
    ended = f"max_minutes={config.max_minutes:g}; resume=true goes on"
    with steps_shown("forwards") as say:
        for way, rows in ways:
            said = " ".join(filter(None, [way.engine.replace("_", " "), way.dtype, way.quantization]))
            if time.perf_counter() > ends:
                late.setdefault(ended, []).append(said)
                continue
            say(said)
            try:
                for row in rows([row for row in kept if row | way == row]):
                    yield way | row
                    if time.perf_counter() > ends:
                        late.setdefault(ended, []).append(f"the rest of {said}")
                        break
            except (ValueError, RuntimeError) as error:  # the other ways go on
                late.setdefault(first_sentence(error), []).append(said)


def _engines(config: DictConfig, engines: Engines, cells: list[Cell], facts: dict[str, Any]) -> Iterator[Way]:
    """This project's ways to run the target, and transformers' own."""
    prompts: Tensor | None = None
    for quantization, dtype in product(config.quantizations, config.dtypes):
        given = _given(config, dtype, quantization)
        loaded, drafter = cache(partial(build, given, "target")), cache(partial(build, given, "drafter"))

        def rows(
            options: dict[str, Any] | None,
            had: list[Figures],
            loaded: Callable[[], Target] = loaded,
            drafter: Callable[[], Drafter | None] = drafter,
        ) -> Iterator[Figures]:
            nonlocal prompts
            ours = [each for each in cells if options is not None or each.tree is None]
            wanted = [each for each in ours if not any(row | each.facts == row for row in had)]
            judge = config.drafter.get("_target_") is not None and not any("drafts" in row for row in had)
            judge = judge and options is not None
            if not wanted and not judge:
                return
            target = loaded()
            if prompts is None:
                prompts = torch.tensor(_prompts(config, target, target.max_length), device=target.device)
                facts.update(model=target.name, prompts=len(prompts))
                note_in_manifest(Path(config.out), facts=facts)
            length = min(config.prompt_tokens + config.tokens, target.max_length)
            begin = through_model(target.model)
            if options is not None:
                nodes = max(cell.shape.num_nodes for cell in cells if cell.shape)
                room = {"max_batch_size": max(listed(config, "batch")), "max_length": length, "max_nodes": nodes}
                begin = through_runner(ModelRunner(target.model, **room, **options))
            yield from measured(begin, prompts, tokens=config.tokens, cells=wanted)
            if judge and options is not None:
                yield _judged(
                    config, Engine(target, drafter(), RejectionVerifier(), max_length=length, **options), prompts
                )

        for name, options in engines.items():
            control = options is not None and bool(options.get("invariant"))
            way = Figures(engine=name, dtype=dtype, quantization=quantization, control=control)
            yield way, partial(rows, options)


def _device(config: DictConfig) -> str:
    """The name of the device that the target will be on, or the first of several."""
    spread = plain(config, "target").get("device_map")
    place = device_of_map(spread) if isinstance(spread, dict) else resolve_device(config.target.get("device", "auto"))
    return device_name(place)


def _judged(config: DictConfig, engine: Engine, prompts: Tensor) -> Figures:
    """The drafts of an engine judged with either forward, sampled and greedy."""
    greedy = SamplingParams(max_new_tokens=config.tokens, seed=config.seed, ignore_eos=True)
    with engine:
        given = replace(greedy, temperature=1.0), greedy
        found = [judged(engine, prompts, sampling, Bootstrap()) for sampling in given]
    return Figures(drafts=job.choice("drafter") or type(engine.drafter).__name__, judged=found)


def _servers(config: DictConfig, facts: dict[str, Any]) -> Iterator[Way]:
    """Servers with OpenAI's endpoint. Of the target, only the tokenizer is loaded."""
    name = str(config.target.name)
    text = TextTarget(load_tokenizer(str(config.target.get("tokenizer") or name)), name)
    batches = listed(config, "batch")
    most, each_group = max(batches), len(batches) + len({*batches} - {1})

    def rows(contender: str, had: list[Figures]) -> Iterator[Figures]:
        groups, begun_rows = divmod(len(had), each_group)
        if had and groups == facts["prompts"] // most:
            return
        server = build(config, f"contenders.{contender}")
        if not isinstance(server, OpenAIServer):
            raise ValueError(f"contenders.{contender} is no server: start it as one, and give +contender=openai")
        server.bind(text, max_batch_size=most, max_length=_ANY)
        prompts = _prompts(config, text, server.max_length - 1)  # a server generates one token more to rescore
        where = f"{server.model} at {server.address}"
        facts.update(model=where, prompts=len(prompts), alternatives=config.alternatives)
        note_in_manifest(Path(config.out), facts=facts)
        given = {"tokens": config.tokens, "batches": batches, "alternatives": config.alternatives}
        yield from islice(through_server(server, prompts[groups * most :], **given), begun_rows, None)

    for contender in config.contenders:
        yield Figures(engine=contender, dtype="", quantization=None, control=False), partial(rows, contender)


def cells_of(config: DictConfig) -> list[Cell]:
    """Returns the kinds of forwards: every batch with a token of each row, with chains, and with trees."""
    chains = [(TreeShape.chain(size - 1), None) for size in listed(config, "sizes")]
    trees = [TreeShape.of(shape) for shape in listed(config, "trees")]
    shapes = [(None, None), *chains, *((shape, written_shape(shape)) for shape in trees)]
    found = [Cell(batch, *shape) for batch, shape in product(listed(config, "batch"), shapes)]
    return [cell for cell in found if cell.batch > 1 or cell.shape]


def engines_of(config: DictConfig) -> Engines:
    """Returns the ways to run the model, as the section ``engines`` has them; refuses what a runner does not take."""
    known = [name for name in signature(ModelRunner).parameters if name not in _NOT_OURS]
    found = {name: None if given == "modules" else given for name, given in plain(config, "engines").items()}
    for name, options in found.items():
        if not isinstance(options, dict | None):
            raise ValueError(f"engines.{name}={options}: give arguments of ModelRunner, such as {{}}, or modules")
        for option in options or {}:
            if option not in known:
                raise ValueError(f"engines.{name}: there is no {option}{did_you_mean(option, known)}")
    for scheme in filter(None, config.quantizations):
        check_quantization(scheme)
    if config.contenders and config.drafter.get("_target_") is not None:
        raise ValueError("a drafter and contenders are both given, and nobody sees a server's drafts: leave one out")
    if not found:
        raise ValueError("engines is empty: give at least one way to run the model, such as engines.specdec={}")
    if config.dataset.get("count") is not None and config.dataset.count < max(listed(config, "batch")):
        raise ValueError(
            f"batch={listed(config, 'batch')} with dataset.count={config.dataset.count}: a batch needs as many prompts"
        )
    return found


def _given(config: DictConfig, dtype: str, quantization: str | None) -> DictConfig:
    """The configuration with a target in a dtype, quantized or not. Speed does not matter: no scheme is too slow."""
    found: Any = OmegaConf.merge(config, {"target": {"dtype": dtype, "quantization_check": False}})
    if quantization is not None:
        found.target.quantization = quantization
    return found


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
