"""An audit by a checked configuration: the prompts, the plan, the outputs, and the verdict."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from experiments.config.kinds import did_you_mean
from experiments.config.sections import build, locate, plain_whole
from experiments.datasets.prompt import choose
from experiments.measuring.gathered import SAMPLES, Audit, Subject, of_engine, of_function
from experiments.reporting import checks, terminal
from experiments.reporting.formats import publish
from experiments.reporting.progress import steps_shown
from experiments.results.manifest import write_manifest
from experiments.results.rows import Row
from experiments.session.engines import new_engine, settle
from experiments.session.methods import check_components
from experiments.session.policies import paced
from experiments.session.resume import begun
from specdec.checks.betting import Power, power
from specdec.checks.mistakes import MISTAKES
from specdec.checks.telling import planned, telling
from specdec.engine.text import encode_prompt
from specdec.requests import SamplingParams
from specdec.target.loading import load
from specdec.target.target import Target

UNKNOWN = ("logits_processor", "grammar", "adapter")
"""Settings of the sampling that change the target's law, and that ``Place.of`` leaves out."""


def audit(config: DictConfig) -> Row:
    """Audit the subject of a checked configuration; a subject that is not lossless is an error."""
    begun(config, kind="audit", begins=SAMPLES)
    settle(config)
    drafts = {} if config.contenders or config.function is not None else {"": "drafter"}
    check_components(config, drafts, ("target", "verifier", "sampling", "dataset"))
    names = list(config.mistakes or MISTAKES)
    if unknown := [name for name in names if name not in MISTAKES]:
        raise ValueError(f"mistakes: there is no {unknown[0]!r}{did_you_mean(unknown[0], MISTAKES)}")
    horizon = config.horizon or max(2, config.undrafted + config.drafted + 1)
    # The last token of an output is not drafted by every engine.
    sampling: SamplingParams = replace(build(config, "sampling"), n=1, max_new_tokens=horizon + 1)
    if sampling.greedy:
        raise ValueError("sampling.temperature=0: a run compares greedy outputs with plain decoding's, token by token")
    if beyond := [name for name in UNKNOWN if getattr(sampling, name) != getattr(SamplingParams(), name)]:
        given = f"sampling.{beyond[0]}={getattr(sampling, beyond[0])}"
        raise ValueError(f"{given}: the law of sampled outputs is computed without it, so leave it out")
    target, subject, function = _sides(config)
    running, powers, unseen = _planned(config, names, target, function, sampling, horizon)
    console, folder = terminal.console(), Path(config.out)
    terminal.show(console, checks.power_table(subject, target.name, powers, running, unseen, config.level))
    if not (folder / SAMPLES).exists():
        write_manifest(folder, plain_whole(config))
    with steps_shown("outputs") as say:
        ended = running.gather(folder, advance=say)
    said, bad = checks.audited(subject, running, ended, config.level)
    figures = {
        "subject": subject,
        "verdict": "not lossless" if bad else "no sign of a mistake" if ended is None else "no verdict",
        "ended": ended,
        "log10_e": float(running.wealth.log_e[0] / np.log(10)),
        "level": config.level,
        "planned": len(running.order) * running.block,
        **{name: getattr(running, name) for name in ("p_value", "outputs", "tokens")},
        "bets": dict(zip(running.wealth.bets, (running.wealth.logs[0] / np.log(10)).tolist(), strict=True)),
        "power": [asdict(power) for power in powers],
        "prompts": [
            {"id": telling.id, "for": telling.best_for, "cells": telling.cells.count, "share": share}
            for telling, share in zip(running.telling, running.question.shares, strict=True)
        ],
    }
    publish(folder, "audit", tables=[checks.bets_table(subject, powers, running, config.level)], figures=figures)
    if bad or ended is not None:
        raise ValueError(said)
    terminal.say(console, said)
    return figures


def _sides(config: DictConfig) -> tuple[Target, str, Subject]:
    """The target, and the subject with its name."""
    others = {str(name): build(config, f"contenders.{name}") for name in config.contenders}
    function = None if config.function is None else locate(config.function, "function")
    if len(others) + (function is not None) > 1:
        raise ValueError("several subjects are given: give one contender, or a function")
    target, size = build(config, "target"), config.engine.max_batch_size
    if function is not None:
        return target, str(config.function), of_function(function, str(config.function))
    for name, other in others.items():
        other.bind(target, max_batch_size=size, max_length=config.engine.max_length)
        other.start()
        return target, name, of_engine(other, size)
    verifier, drafter = build(config, "verifier"), paced(build(config, "drafter"), build(config, "policy"))
    name = "plain decoding" if drafter is None else f"{type(drafter).__name__} with {type(verifier).__name__}"
    return target, name, of_engine(new_engine(config, target, drafter, verifier), size)


def _planned(
    config: DictConfig, names: list[str], target: Target, subject: Subject, sampling: SamplingParams, horizon: int
) -> tuple[Audit, list[Power], list[str]]:
    """The audit, its power against each mistake that shows with this sampling, and the names of the other mistakes."""
    assistant = load(config.assistant, dtype=config.target.dtype, device=config.target.device).model
    if assistant.config.vocab_size != target.vocab_size:
        raise ValueError(
            f"assistant={config.assistant} has {assistant.config.vocab_size} tokens, and {target.name} has "
            f"{target.vocab_size}: give a small model with the target's vocabulary"
        )
    encoded = [
        (prompt.id, tuple(encode_prompt(target.tokenizer, prompt.turns[0])[-config.context :]))
        for prompt in choose(build(config, "dataset"))[0]
    ]
    ends = frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else target.eos_token_ids)
    with steps_shown("laws of the next tokens") as say:
        limits = {"drafted": config.drafted, "undrafted": config.undrafted, "tolerance": config.tolerance}
        options = {"horizon": horizon, "ends": ends, "names": names, "advance": say, **limits}
        candidates = telling(encoded, target.model, assistant, sampling, **options)
        tolerance = horizon * config.tolerance
        chosen, question = planned(candidates, names, level=config.level, tolerance=tolerance, block=config.block)

        def powers_within(blocks: int) -> list[Power]:
            say("power against every mistake")
            options = {"blocks": blocks, "wanted": config.wanted, "seed": config.seed}
            return [power(question, mistake, **options) for mistake in question.mistakes]

        most = max(config.max_samples // config.block, 1)
        first = powers_within(most)
        needed = [each.samples or config.max_samples for each in first if each.distance >= config.least]
        blocks = min(most, -(-max(needed, default=config.block) // config.block))
        final = powers_within(blocks)
    prompts, order = [prompt.ids for prompt in chosen], question.order(blocks).tolist()
    sizes = {"block": config.block, "horizon": horizon, "vocab": target.vocab_size, "ends": ends}
    audit = Audit(subject, sampling, prompts, order, question=question, telling=chosen, **sizes)
    powers = [replace(after, samples=before.samples) for before, after in zip(first, final, strict=True)]
    return audit, powers, [name for name in names if name not in question.mistakes]
