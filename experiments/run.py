"""Measure one method against plain decoding: ``python -m experiments.run drafter=medusa sampling.temperature=1``."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Group, RenderableType
from transformers.utils import logging as transformers_logging

from experiments import resume
from experiments.categories import category_plot, category_table
from experiments.cli import launch
from experiments.config import build, check_arguments
from experiments.datasets.prompt import choose, fingerprint, warmup_texts
from experiments.jobs import prepare
from experiments.manifest import device_name, write_manifest
from experiments.measure import PLAIN, Contender, failure, measure
from experiments.plots import acceptance_plot, speedup_plot, time_plot
from experiments.records import Record
from experiments.report import run_table
from experiments.results import complete, load_run
from experiments.session import Plot, Session, check, short
from experiments.summary import Bootstrap, Summary
from experiments.trace import TraceWriter
from specdec.engine.engine import Engine
from specdec.engine.text import encode_prompt
from specdec.interfaces import Drafter, Verifier
from specdec.modeling.target import Target
from specdec.random import fresh_seed
from specdec.requests import SamplingParams

PLOTS: dict[str, Plot] = {
    "speedup.png": speedup_plot,
    "acceptance_by_position.png": acceptance_plot,
    "time.png": time_plot,
}


def run(config: DictConfig) -> Summary:
    """Measure the configuration's drafter."""
    plots = PLOTS | {"categories.png": category_plot}
    return compare(config, methods={config.method: "drafter"}, table=_tables, plots=plots)


def _tables(summary: Summary, title: str) -> RenderableType:
    categories = category_table(summary)
    return Group(run_table(summary, title), *([categories] if categories is not None else []))


def compare(
    config: DictConfig,
    *,
    methods: Mapping[str, str],
    table: Callable[[Summary, str], RenderableType],
    temperatures: Sequence[float] = (),
    plots: Mapping[str, Plot] = PLOTS,
) -> Summary:
    """Measure plain decoding and methods on the same prompts, and write everything into ``config.out``.

    Args:
        config: With the sections that ``conf/run.yaml`` has.
        methods: Names, and the configuration sections of their drafters.
        table: Makes the table.
        temperatures: One after the other; by default the sampling's own.
        plots: Pictures, by file name.
    """
    folder = Path(config.out)
    earlier = resume.begun(config)
    settle(config)
    trace = TraceWriter(folder, dropped=config.trace_dropped) if config.trace else None
    # What is cheap to check comes before what takes long to load.
    sampling: SamplingParams = build(config, "sampling")
    samplings = [dataclasses.replace(sampling, temperature=t) for t in temperatures] or [sampling]
    prompts, spare = choose(build(config, "dataset"), spare=config.warmup_prompts)
    check_arguments(Bootstrap, dict(config.bootstrap), "bootstrap")
    bootstrap = Bootstrap(**config.bootstrap)
    known: dict[str, Any] = {"prompts": len(prompts), "prompts_hash": fingerprint(prompts)}
    if earlier is not None:
        resume.check_facts(earlier, folder, **known)
        if complete(folder):
            return already_complete(folder)
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
    template: Any = OmegaConf.to_container(config.chat_template, resolve=True)
    prepared = [prepare(prompts, each, tokenizer, max_length=first.max_length, template=template) for each in samplings]
    warmup = encode_warmup(warmup_texts(prompts, spare, config.warmup_prompts), target, sampling, first.max_length)

    folder.mkdir(parents=True, exist_ok=True)
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    turns = sum(len(prompt.turns) for prompt in prompts)
    known |= {
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": {
            "name": target.name,
            "parameters": target.num_parameters,
            "bytes_per_weight": round(target.bytes_per_weight, 4),
            "kv_bytes_per_position": first.runner.bytes_per_token,
        },
        "exactness": {contender.method: contender.exactness for contender in contenders},
        "seeds": {"sampling": sampling.seed, "dataset": config.dataset.get("seed"), "bootstrap": bootstrap.seed},
        "chat_template": bool(tokenizer.chat_template) and any(prompt.chat for prompt in prompts),
        "planned": turns * sampling.n,
        "groups": len(contenders) * len(samplings),
        "overrides": list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else [],
    }
    kept: list[Record] | None = None
    finished: dict[float, set[int]] = {}
    if earlier is None:
        write_manifest(folder, resolved, **known)
    else:
        resume.check_facts(earlier, folder, **known)
        jobs = {each.temperature: listed for each, (listed, _) in zip(samplings, prepared, strict=True)}
        kept, finished = resume.finished_batches(folder, jobs, methods=len(contenders), size=first.max_batch_size)
        resume.note_resumed(folder, earlier)
    session = Session(
        folder=folder,
        planned=known["planned"],
        groups=known["groups"],
        bootstrap=bootstrap,
        tracker=tracker,
        table=table,
        title=title(target, samplings, f"{amount(len(prompts), turns)}, batch {first.max_batch_size}"),
        plots=dict(plots),
        before=[
            failure(contender, dataclasses.replace(unfit, turn=turn), reason)
            for _, refused in prepared
            for unfit, reason in refused
            for turn in range(len(unfit.prompt.turns))
            for contender in contenders
        ],
        kept=kept,
    )

    def work(write: Callable[[Record], None]) -> Iterator[int]:
        before = 0
        for each, (jobs, _) in zip(samplings, prepared, strict=True):
            passed = finished.get(each.temperature, ())
            options = {"warmup": warmup, "finished": passed, "template": template, "trace": trace}
            for done in measure(contenders, jobs, write=write, **options):
                yield before + done
            before += len(jobs)

    tracker.start(resolved, folder)
    return session.run(work, sum(len(jobs) for jobs, _ in prepared))


def already_complete(folder: Path) -> Summary:
    """The figures of a run that has nothing left to do."""
    print(f"{short(folder)} is complete already")
    summary = load_run(folder).summary
    check(summary)
    return summary


def settle(config: DictConfig) -> None:
    """Check the run's own settings, and fill in what is left to chance."""
    for name, least in (("seed", 0), ("warmup_prompts", 0), ("threads", 1)):
        value = config.get(name)
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{name}={value!r}: give an integer of at least {least}")
    if type(config.trace) is not bool:
        raise ValueError(f"trace={config.trace!r}: give true or false")
    if type(config.trace_dropped) not in (int, float) or not 0 <= config.trace_dropped < 1:
        raise ValueError(f"trace_dropped={config.trace_dropped!r}: give a mass from 0 (keep every token) to below 1")
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


def amount(prompts: int, turns: int) -> str:
    """How much is measured, in words."""
    return f"{prompts} prompts" if turns == prompts else f"{prompts} prompts of {turns} turns in all"


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
