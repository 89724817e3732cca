"""A measurement assembled from its configuration: models, engines, prompts, and what records and shows them."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from experiments.config import ranks
from experiments.config.sections import bootstrap_of, build, in_sweep, job_overrides, plain, plain_whole
from experiments.datasets.prompt import Prompt, choose, fingerprint, licenses, selection_of, warmup_texts
from experiments.measuring.jobs import Fitting, fit, prepare, template_facts
from experiments.measuring.measure import Contender, blocks_of, measure, slots_of, started
from experiments.measuring.meters import held_by, process_bytes
from experiments.reporting.progress import phase
from experiments.reporting.terminal import short
from experiments.results.manifest import check_facts, device_name, note_resumed, write_manifest
from experiments.results.origin import read_manifest
from experiments.results.records import Record, finished_batches
from experiments.results.runs import Run, complete, load_run
from experiments.results.texts import write_prompts, write_token_texts
from experiments.session.engines import accounted, assemble, peaks_of, settle
from experiments.session.measurement import Measurement, Report, check_finished, check_lossless
from experiments.session.methods import check_components, revisions_of
from experiments.session.policies import named_policy
from experiments.session.resume import begun
from experiments.session.tracked import tracked_run
from experiments.tracing.trace import TraceWriter
from experiments.tracking.base import NullTracker
from experiments.tracking.mirror import Mirror
from specdec.engine.engine import Engine
from specdec.engine.text import encode_prompt
from specdec.requests import SamplingParams
from specdec.target.spelling import token_bytes
from specdec.target.target import Target


def measure_methods(
    config: DictConfig, *, methods: Mapping[str, str], report: Report, temperatures: Sequence[float] = ()
) -> Run:
    """Measure plain decoding and methods on the same prompts, and write everything into ``config.out``.

    Args:
        config: With the sections that ``conf/run.yaml`` has; its settings are checked.
        methods: Names, and the configuration sections of their drafters.
        temperatures: One after the other; by default the sampling's own alone.
    """
    folder = Path(config.out)
    before = begun(config)
    settle(config)
    formats = check_components(config, methods)
    # What is cheap to check comes before what takes long to load.
    bootstrap = bootstrap_of(config)
    sampling, dataset = build(config, "sampling"), build(config, "dataset")
    samplings = [dataclasses.replace(sampling, temperature=temperature) for temperature in temperatures] or [sampling]
    chosen, spare = choose(dataset, spare=config.warmup_prompts)
    facts: dict[str, Any] = {"chosen_hash": fingerprint(chosen)}
    if before is not None:
        check_facts(before, folder, **facts)
        if complete(folder):
            run = load_run(folder)
            if not in_sweep():
                print(f"{short(folder)} is complete already")
            check_finished(run)
            check_lossless(run)
            return run
    begin = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    tracker = NullTracker() if ranks.follows() else build(config, "tracker") or NullTracker()
    program = process_bytes()["process"]
    target, contenders = assemble(config, methods, samples=[prompt.turns[0] for prompt in chosen[:8]], formats=formats)
    contenders = accounted(contenders)
    blocks = blocks_of(contenders)
    engine, tokenizer = contenders[0].engine, target.tokenizer
    assert tokenizer is not None, "assemble refuses a target without one"
    facts["loading_seconds"] = round(time.perf_counter() - begin, 3)
    sampling = samplings[0]
    for contender in contenders:
        if isinstance(contender.engine, Engine):
            contender.engine.check(sampling, speculate=contender.speculate)
        else:
            for asked in samplings:
                contender.engine.check_sampling(asked)
    template = plain(config, "chat_template")
    limits = {"max_length": engine.max_length, "policy": selection_of(dataset).too_long}
    fitting = fit(chosen, sampling, tokenizer, template=template, **limits)
    prompts = fitting.prompts
    facts |= {"prompts": len(prompts), "prompts_hash": fingerprint(prompts), "too_long": fitting.facts}
    facts |= {"licenses": licenses(prompts), "template": template_facts(prompts, tokenizer, template)}
    prepared = [prepare(prompts, each, tokenizer, template=template) for each in samplings]
    texts = warmup_texts(prompts, spare, config.warmup_prompts)
    # Kernels prepare themselves for a shape when they first meet it: prompts of one length are warmed up for with it.
    lengths = [prompt.last_tokens for prompt in prompts]
    most = max(length or 0 for length in lengths) if all(lengths) else None
    room = min(engine.max_length - sampling.max_new_tokens, most or engine.max_length)
    warmup = [ids for text in texts if (ids := list(encode_prompt(tokenizer, text))[:room])]
    facts |= facts_of(target, contenders, prompts, samplings)
    held = held_by([contender.engine for contender in contenders if isinstance(contender.engine, Engine)])
    held["program"] = program
    facts["memory"] = {"held": held}
    wanted = config.get("peaks", "none") != "none"
    facts["peaks"] = before.get("peaks") if before is not None else peaks_of(target) if wanted else None
    facts["revisions"] = revisions_of(config, methods)
    facts["seeds"] = {"sampling": sampling.seed, "dataset": config.dataset.get("seed"), "bootstrap": bootstrap.seed}
    resolved = plain_whole(config)
    kept: list[Record] | None = None
    finished: dict[float, set[int]] = {}
    size = slots_of(contenders)
    if before is None:
        write_manifest(folder, resolved, **facts)
    else:
        check_facts(before, folder, **facts)
        turns = {
            each.temperature: [len(job.prompt.turns) for job in jobs]
            for each, jobs in zip(samplings, prepared, strict=True)
        }
        kept, finished = finished_batches(folder, turns, methods=list(map(len, blocks)), size=size)
        note_resumed(folder, before)
    write_prompts(folder, prompts)
    batches = sorted({contender.engine.max_batch_size for contender in contenders})
    invariant = ", invariant" if isinstance(engine, Engine) and engine.runner.invariant else ""
    mirror = Mirror(tracker, [contender.method for contender in contenders], [each.temperature for each in samplings])
    measurement = Measurement(
        config=config,
        facts=facts,
        contenders=contenders,
        report=report,
        title=title(
            target,
            samplings,
            f"{amount(fitting)}{said_of(facts['template'])}, batch {' and '.join(map(str, batches))}{invariant}, "
            f"{facts['attention']} attention{named_policy(config)}",
            kv_cache=facts["target"]["kv_cache"],
        ),
        mirror=mirror,
        held=held,
        kept=kept,
        passed=sum(
            min(size, len(jobs) - number % -(-len(jobs) // size) * size)
            for each, jobs in zip(samplings, prepared, strict=True)
            for number in finished.get(each.temperature, ())
        ),
    )
    trace = TraceWriter(folder, dropped=config.trace_dropped) if config.trace else None

    said = {token for record in kept or () for token in record.token_ids}

    def work(write: Callable[[Record], None]) -> Iterator[int]:
        def noted(record: Record) -> None:
            said.update(record.token_ids)
            write(record)

        done = 0
        try:
            for number, block in enumerate(blocks):
                with started(block):
                    for each, jobs in zip(samplings, prepared, strict=True):
                        first, passed = number * -(-len(jobs) // size), finished.get(each.temperature, ())
                        options = {"warmup": warmup, "finished": passed, "template": template, "trace": trace}
                        for step in measure(block, jobs, write=noted, first=first, **options):
                            yield done + step
                        done += len(jobs)
        finally:
            shown = said | (trace.tokens if trace is not None else set())
            write_token_texts(folder, token_bytes(shown, tokenizer))

    for sentence in (fitting.sentence, left_out(target, samplings)):
        if sentence is not None and not in_sweep():
            print(sentence, file=sys.stderr)
    mirror.start(tracked_run(folder, read_manifest(folder)), kept=len(kept or ()))
    phase(f"warming up, then measuring {len(contenders)} methods on {len(prompts)} prompts", shown=not in_sweep())
    return measurement.run(work, len(blocks) * sum(map(len, prepared)))


_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_APPLIED = (*_FILTERS, "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens")


def left_out(target: Target, samplings: Sequence[SamplingParams]) -> str | None:
    """A sentence about settings of the model's own files that ``generate`` applies and a run does not; None without."""
    config = getattr(target.model, "generation_config", None)
    said = {} if config is None else config.to_diff_dict()
    names = [name for name in _APPLIED if name not in _FILTERS or not all(each.greedy for each in samplings)]
    values = {name: said[name] for name in names if said.get(name) not in (None, [])}
    other = [f"{n}={v}" for n, v in values.items() if any(getattr(each, n, None) != v for each in samplings)]
    if not other:
        return None
    return f"the model's generation config sets {', '.join(other)}, which this run leaves out (sampling=…)"


def facts_of(
    target: Target, contenders: Sequence[Contender], prompts: Sequence[Prompt], samplings: Sequence[SamplingParams]
) -> dict[str, Any]:
    """What the manifest says about a run besides its configuration."""
    template = target.tokenizer is not None and bool(target.tokenizer.chat_template)
    baseline = contenders[0].engine
    assert isinstance(baseline, Engine), "plain decoding runs on our engine"
    return {
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "dtype_reason": target.dtype_reason,
        "attention": baseline.runner.attention_name,
        "attention_reason": baseline.runner.attention_reason,
        "threads": torch.get_num_threads(),
        "target": {
            "name": target.name,
            "parameters": target.num_parameters,
            "bytes_per_weight": round(baseline.runner.weights_read().bytes_per_weight, 4),
            "kv_cache": baseline.runner.kv_cache,
        },
        "exactness": {contender.method: contender.exactness for contender in contenders},
        "chat_template": template and any(prompt.chat for prompt in prompts),
        "planned": sum(len(prompt.turns) for prompt in prompts) * samplings[0].n,
        "series": len(contenders) * len(samplings),
        "overrides": job_overrides(),
    }


def amount(fitting: Fitting) -> str:
    """How much is measured, in words."""
    prompts = fitting.prompts
    turns = sum(len(prompt.turns) for prompt in prompts)
    said = f"{len(prompts)} prompts" + (f" of {turns} turns in all" if turns != len(prompts) else "")
    counts = fitting.facts or {"cut": 0, "skipped": 0}
    more = [f"{counts['cut']} of them shortened"] if counts["cut"] else []
    more += [f"{counts['skipped']} too long ones left out"] if counts["skipped"] else []
    known = list(licenses(prompts))
    more += [known[0] if len(known) == 1 else f"{len(known)} licences"] if known else []
    return said + (f" ({', '.join(more)})" if more else "")


def said_of(template: Mapping[str, Any] | None) -> str:
    """The arguments of the chat template, in words; empty without any."""
    return "".join(f", {name}={value}" for name, value in (template or {}).items() if name != "hash")


def title(target: Target, samplings: Sequence[SamplingParams], amount: str, *, kv_cache: str | None = None) -> str:
    """Model, device and conditions, for tables and pictures."""
    size, dtype = f"{target.num_parameters / 1e6:,.1f}M parameters", target.dtype_reason
    temperatures = " and ".join(f"{sampling.temperature:g}" for sampling in samplings)
    dtype += f", keys and values in {kv_cache}" if kv_cache is not None else ""
    return f"{target.name} ({size}, {dtype}) on {device_name(target.device)}; temperature {temperatures}, {amount}"
