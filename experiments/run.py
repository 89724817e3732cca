"""Measure one method against plain decoding: ``python -m experiments.run drafter=medusa sampling.temperature=1``."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.table import Table
from transformers.utils import logging as transformers_logging

from experiments.cli import launch
from experiments.config import build, check_arguments
from experiments.datasets.prompt import choose, warmup_texts
from experiments.manifest import device_name, write_manifest
from experiments.measure import PLAIN, Contender, failure, measure, prepare
from experiments.plots import acceptance_plot, speedup_plot, time_plot
from experiments.records import RECORDS, Record
from experiments.report import run_table
from experiments.session import Session
from experiments.summary import Bootstrap, Summary
from specdec.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.random import fresh_seed
from specdec.requests import SamplingParams
from specdec.target import Target
from specdec.text import encode_prompt


def run(config: DictConfig) -> Summary:
    """Measure the configuration's drafter."""
    return compare(config, methods={config.method: "drafter"}, table=run_table)


def compare(
    config: DictConfig,
    *,
    methods: Mapping[str, str],
    table: Callable[[Summary, str], Table],
    temperatures: Sequence[float] = (),
) -> Summary:
    """Measure plain decoding and methods on the same prompts, and write everything into ``config.out``.

    Args:
        config: With the sections that ``conf/run.yaml`` has.
        methods: Names, and the configuration sections of their drafters.
        table: Makes the table.
        temperatures: One after the other; by default the sampling's own.
    """
    settle(config)
    folder = Path(config.out)
    if (folder / RECORDS).exists():
        raise ValueError(f"{folder} holds the results of another run: give another out, or remove it")
    # What is cheap to check comes before what takes long to load.
    sampling: SamplingParams = build(config, "sampling")
    samplings = [replace(sampling, temperature=t) for t in temperatures] or [sampling]
    prompts, spare = choose(build(config, "dataset"), spare=config.warmup_prompts)
    check_arguments(Bootstrap, dict(config.bootstrap), "bootstrap")
    bootstrap = Bootstrap(**config.bootstrap)
    tracker = build(config, "tracker")
    drafters = {name: build(config, section) for name, section in methods.items()}
    verifiers = {name: build(config, "verifier") for name in methods}
    target: Target = build(config, "target")
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer, and the prompts of a dataset are text")
    engines = {name: new_engine(config, target, drafters[name], verifiers[name]) for name in methods}

    # Plain decoding runs on the first method's engine.
    first = next(iter(engines.values()))
    contenders = [Contender(PLAIN, first, speculate=False)]
    contenders += [Contender(name, engine) for name, engine in engines.items() if engine.drafter is not None]
    prepared = [prepare(prompts, each, tokenizer, max_length=first.max_length) for each in samplings]
    warmup = encode_warmup(warmup_texts(prompts, spare, config.warmup_prompts), target, sampling, first.max_length)

    folder.mkdir(parents=True, exist_ok=True)
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    write_manifest(
        folder,
        resolved,
        device=device_name(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        target={"name": target.name, "parameters": target.num_parameters},
        exactness={contender.method: contender.exactness for contender in contenders},
        seeds={"sampling": sampling.seed, "dataset": config.dataset.get("seed"), "bootstrap": bootstrap.seed},
        prompts=len(prompts),
        chat_template=bool(tokenizer.chat_template) and any(prompt.chat for prompt in prompts),
    )
    session = Session(
        folder=folder,
        planned=len(prompts) * sampling.n,
        groups=len(contenders) * len(samplings),
        bootstrap=bootstrap,
        tracker=tracker,
        table=table,
        title=title(target, samplings, f"{len(prompts)} prompts, batch {first.max_batch_size}"),
        plots={"speedup.png": speedup_plot, "acceptance_by_position.png": acceptance_plot, "time.png": time_plot},
        before=[
            failure(contender, unfit, reason)
            for _, refused in prepared
            for unfit, reason in refused
            for contender in contenders
        ],
    )

    def work(write: Callable[[Record], None]) -> Iterator[int]:
        before = 0
        for jobs, _ in prepared:
            for done in measure(contenders, jobs, warmup=warmup, write=write):
                yield before + done
            before += len(jobs)

    tracker.start(resolved, folder)
    return session.run(work, sum(len(jobs) for jobs, _ in prepared))


def settle(config: DictConfig) -> None:
    """Check the run's own settings, and fill in what is left to chance."""
    for name, least in (("seed", 0), ("warmup_prompts", 0), ("threads", 1)):
        value = config.get(name)
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{name}={value!r}: give an integer of at least {least}")
    if config.seed is None:
        config.seed = fresh_seed()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    transformers_logging.disable_progress_bar()
    # It reports every attempt to reach the hub, and what it raises at the end says it all.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def new_engine(config: DictConfig, target: Target, drafter: Drafter | None, verifier: Verifier | None) -> Engine:
    """An engine by the configuration's settings; without a drafter it needs no verifier."""
    options: Any = OmegaConf.to_container(config.engine, resolve=True)
    check_arguments(Engine, options, "engine")
    return Engine(target, drafter, verifier if drafter is not None else None, **options)


def encode_warmup(texts: list[str], target: Target, sampling: SamplingParams, max_length: int) -> list[list[int]]:
    """Warm-up prompts as tokens, cut where they are too long."""
    room = max_length - sampling.max_new_tokens
    encoded = [list(encode_prompt(target.tokenizer, text))[:room] for text in texts]
    return [ids for ids in encoded if ids]


def title(target: Target, samplings: Sequence[SamplingParams], amount: str) -> str:
    """Model, device and conditions, for tables and pictures."""
    size, dtype = f"{target.num_parameters / 1e6:,.1f}M parameters", str(target.dtype).removeprefix("torch.")
    temperatures = " and ".join(f"{sampling.temperature:g}" for sampling in samplings)
    return f"{target.name} ({size}, {dtype}) on {device_name(target.device)}; temperature {temperatures}, {amount}"


def main() -> None:
    """Entry point of ``specdec-run``."""
    launch(run, "run")


if __name__ == "__main__":
    main()
