"""An audit by a checked configuration: the telling prompts, the plan, the outputs, and the verdict."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from experiments.config.checking import did_you_mean
from experiments.config.pairs import check_files
from experiments.config.sections import build, locate, plain_whole
from experiments.contenders.base import OtherEngine
from experiments.datasets.prompt import choose
from experiments.measuring.audited import SAMPLES, Gathered, Subject, of_engine, of_function
from experiments.reporting import terminal
from experiments.reporting.audit import plan_lines, plan_table, verdict, verdict_table
from experiments.reporting.formats import publish
from experiments.reporting.progress import steps_shown
from experiments.results.frame import Figures
from experiments.results.manifest import write_manifest
from experiments.session.engines import new_engine, settle
from experiments.session.methods import check_components
from experiments.session.policies import paced
from experiments.session.resume import begun
from specdec.checks.betting import Power, Question, p_value, power
from specdec.checks.mistakes import HONEST, MISTAKES
from specdec.checks.telling import telling
from specdec.engine.text import encode_prompt
from specdec.requests import SamplingParams
from specdec.target.loading import load
from specdec.target.target import Target


def audit(config: DictConfig) -> Figures:
    """Audit the subject of a checked configuration; a subject that is not lossless is an error."""
    folder = Path(config.out)
    before = begun(config, kind="audit", begins=SAMPLES)
    settle(config)
    check_components(config, {"": "drafter"}, ("target", "verifier", "sampling", "dataset"))
    function = None if config.function is None else locate(config.function, "function")
    if len(config.contenders) + (function is not None) > 1:
        raise ValueError("several subjects are given: give one contender, or a function")
    names = list(config.mistakes or MISTAKES)
    for name in names:
        if name not in MISTAKES:
            raise ValueError(f"mistakes: there is no {name!r}{did_you_mean(name, MISTAKES)}")
    length = config.horizon + config.drafted  # so that no round within the horizon drafts less
    sampling: SamplingParams = replace(build(config, "sampling"), max_new_tokens=length, n=1)
    if sampling.greedy:
        raise ValueError("sampling.temperature=0 leaves nothing to chance: experiments.run compares greedy outputs")
    check_files(config)
    target: Target = build(config, "target")
    name, subject = _subject(config, target, function)
    assistant = load(config.assistant, dtype=config.target.dtype, device=config.target.device).model
    if assistant.config.vocab_size != target.vocab_size:
        raise ValueError(
            f"assistant={config.assistant} has {assistant.config.vocab_size} tokens, and {target.name} has "
            f"{target.vocab_size}: give a small model with the target's vocabulary"
        )
    ends = frozenset() if sampling.ignore_eos else frozenset(target.eos_token_ids)
    with steps_shown("laws of the next tokens") as say:
        prompts = telling(
            [
                (each.id, tuple(encode_prompt(target.tokenizer, each.turns[0])[-config.context :]))
                for each in choose(build(config, "dataset"))[0]
            ],
            target.model,
            assistant,
            sampling,
            horizon=config.horizon,
            drafted=config.drafted,
            ends=ends,
            names=names,
            advance=say,
        )
        question = Question(
            laws=[each.laws[HONEST] for each in prompts],
            mistakes={name: [each.laws[name] for each in prompts] for name in names},
            level=config.level,
            tolerance=config.horizon * config.tolerance,
            block=config.block,
        )
        most = max(config.max_samples // (config.block * len(prompts)), 1)
        powers = []
        for mistake in names:
            say(f"power against {mistake}")
            powers.append(power(question, mistake, blocks=most, wanted=config.wanted, seed=config.seed))
        planned = [each.samples or config.max_samples for each in powers if each.distance >= config.least]
        blocks = min(most, -(-max(planned, default=config.block) // (config.block * len(prompts))))
        powers = [
            replace(
                power(question, each.mistake, blocks=blocks, wanted=config.wanted, seed=config.seed),
                samples=each.samples,
            )
            for each in powers
        ]
    console = terminal.console()
    terminal.show(console, plan_table(name, target.name, powers, prompts))
    terminal.say(console, *plan_lines(blocks * config.block * len(prompts), question, config.horizon + config.drafted))
    folder.mkdir(parents=True, exist_ok=True)
    if before is None:
        write_manifest(folder, plain_whole(config))
    gathered = Gathered(question, prompts, target.vocab_size, ends)
    with steps_shown("outputs") as say:
        ended = gathered.gather(subject, sampling, folder, most=blocks, advance=say)
    return _report(folder, name, gathered, powers, ended, blocks)


def _subject(config: DictConfig, target: Target, function: Callable[..., Any] | None) -> tuple[str, Subject]:
    """The subject and what it is called."""
    size = config.engine.max_batch_size
    if function is not None:
        return str(config.function), of_function(function, str(config.function))
    for name in config.contenders:
        other: OtherEngine = build(config, f"contenders.{name}")
        other.bind(target, max_batch_size=size, max_length=config.engine.max_length)
        return str(name), of_engine(other, size)
    verifier, drafter = build(config, "verifier"), paced(build(config, "drafter"), build(config, "policy"))
    engine = new_engine(config, target, drafter, verifier)
    name = "plain decoding" if drafter is None else f"{type(drafter).__name__} with {type(verifier).__name__}"
    return name, of_engine(engine, size)


def _report(
    folder: Path, name: str, gathered: Gathered, powers: list[Power], ended: str | None, blocks: int
) -> Figures:
    """Print and write what was found."""
    complete = gathered.blocks == blocks * len(gathered.prompts)
    p = p_value(gathered.question, [each[0] for each in gathered.wealth.seen]) if complete else None
    said, bad = verdict(name, gathered, p, ended)
    found = Figures(
        subject=name,
        verdict="not lossless" if bad else "no sign of a mistake" if ended is None else "no verdict",
        log10_e=float(gathered.wealth.log_e[0] / np.log(10)),
        p_value=p,
        level=gathered.question.level,
        outputs=gathered.blocks * gathered.question.block,
        tokens=gathered.tokens,
        planned=blocks * gathered.question.block * len(gathered.prompts),
        ended=ended,
        bets=dict(zip(gathered.question.bets, (gathered.wealth.logs[0] / np.log(10)).tolist(), strict=True)),
        power=[asdict(each) for each in powers],
        prompts=[{"id": each.id, "for": each.best_for, "cells": each.cells.count} for each in gathered.prompts],
    )
    publish(folder, "audit", tables=[verdict_table(name, powers, gathered, p)], figures=found)
    if bad or ended is not None:
        raise ValueError(said)
    terminal.say(terminal.console(), said)
    return found
