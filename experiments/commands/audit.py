"""An audit by a checked configuration: the prompts, the plan, the outputs, and the verdict."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from transformers import PreTrainedModel

from experiments.config.kinds import did_you_mean
from experiments.config.sections import build, locate, plain_whole
from experiments.datasets.prompt import Prompt, choose
from experiments.measuring.gathered import (
    SAMPLES,
    Audit,
    Greedy,
    Sampled,
    Subject,
    of_engine,
    of_function,
)
from experiments.measuring.jobs import Job
from experiments.reporting import terminal
from experiments.reporting.audit import (
    differences_table,
    greedy_verdict,
    plan_lines,
    plan_table,
    verdict,
    verdict_table,
)
from experiments.reporting.formats import publish
from experiments.reporting.progress import steps_shown
from experiments.reporting.table import Table
from experiments.results.frame import Figures
from experiments.results.manifest import write_manifest
from experiments.session.engines import new_engine, settle
from experiments.session.methods import check_components
from experiments.session.policies import paced
from experiments.session.resume import begun
from specdec.checks.betting import power
from specdec.checks.mistakes import MISTAKES
from specdec.checks.telling import planned, telling
from specdec.engine.text import encode_prompt
from specdec.requests import SamplingParams
from specdec.target.loading import load
from specdec.target.target import Target

UNKNOWN = ("logits_processor", "grammar", "adapter")
"""Settings of the sampling that change the target's law, and that ``Place.of`` leaves out."""


@dataclass(frozen=True)
class _Setting:
    """A subject, its target, and its requests, of whose outputs ``horizon`` tokens are looked at."""

    config: DictConfig
    target: Target
    name: str
    subject: Subject
    sampling: SamplingParams
    prompts: list[tuple[Prompt, tuple[int, ...]]]
    horizon: int
    ends: frozenset[int]


def audit(config: DictConfig) -> Figures:
    """Audit the subject of a checked configuration; a subject that is not lossless is an error."""
    begun(config, kind="audit", begins=SAMPLES)
    settle(config)
    check_components(config, {"": "drafter"}, ("target", "verifier", "sampling", "dataset"))
    for name in config.mistakes or ():
        if name not in MISTAKES:
            raise ValueError(f"mistakes: there is no {name!r}{did_you_mean(name, MISTAKES)}")
    sampling: SamplingParams = replace(build(config, "sampling"), n=1)
    beyond = [name for name in UNKNOWN if getattr(sampling, name) != getattr(SamplingParams(), name)]
    if beyond and not sampling.greedy:
        raise ValueError(
            f"sampling.{beyond[0]}={getattr(sampling, beyond[0])}: the law of sampled outputs is computed without it, "
            f"so leave it out, or audit at temperature 0"
        )
    target, name, subject = _sides(config)
    horizon = config.horizon or max(2, config.undrafted + config.drafted + 1)
    setting = _Setting(
        config,
        target,
        name,
        subject,
        # The last token of an output is not drafted by every engine.
        sampling if sampling.greedy else replace(sampling, max_new_tokens=horizon + 1),
        [
            (prompt, tuple(encode_prompt(target.tokenizer, prompt.turns[0])[-config.context :]))
            for prompt in choose(build(config, "dataset"))[0]
        ],
        horizon,
        frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else target.eos_token_ids),
    )
    return (_greedy if sampling.greedy else _sampled)(setting)


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
        return target, name, of_engine(other, size)
    verifier, drafter = build(config, "verifier"), paced(build(config, "drafter"), build(config, "policy"))
    name = "plain decoding" if drafter is None else f"{type(drafter).__name__} with {type(verifier).__name__}"
    return target, name, of_engine(new_engine(config, target, drafter, verifier), size)


def _assistant(config: DictConfig, target: Target, *, padded: bool = False) -> PreTrainedModel:
    """The small model that the mistakes are worked out with; ``padded``: the vocabularies' unused ends may differ."""
    assistant = load(config.assistant, dtype=config.target.dtype, device=config.target.device).model
    size = assistant.config.vocab_size
    if size < len(target.tokenizer or ()) if padded else size != target.vocab_size:
        raise ValueError(
            f"assistant={config.assistant} has {size} tokens, and {target.name} has {target.vocab_size}: give a small "
            f"model with the target's vocabulary"
        )
    return assistant


def _sampled(setting: _Setting) -> Figures:
    config, target = setting.config, setting.target
    names, assistant = list(config.mistakes or MISTAKES), _assistant(config, target)
    with steps_shown("laws of the next tokens") as say:
        candidates = telling(
            [(prompt.id, ids) for prompt, ids in setting.prompts],
            target.model,
            assistant,
            setting.sampling,
            horizon=setting.horizon,
            drafted=config.drafted,
            undrafted=config.undrafted,
            ends=setting.ends,
            names=names,
            tolerance=config.tolerance,
            advance=say,
        )
        tolerance = setting.horizon * config.tolerance
        chosen, question = planned(candidates, names, level=config.level, tolerance=tolerance, block=config.block)
        most, powers = max(config.max_samples // config.block, 1), []
        for mistake in question.mistakes:
            say(f"power against {mistake}")
            powers.append(power(question, mistake, blocks=most, wanted=config.wanted, seed=config.seed))
        needed = [each.samples or config.max_samples for each in powers if each.distance >= config.least]
        blocks = min(most, -(-max(needed, default=config.block) // config.block))
        final = [
            power(question, each.mistake, blocks=blocks, wanted=config.wanted, seed=config.seed) for each in powers
        ]
        powers = [replace(after, samples=before.samples) for before, after in zip(powers, final, strict=True)]
    running = Sampled(
        subject=setting.subject,
        sampling=setting.sampling,
        prompts=[each.ids for each in chosen],
        order=question.order(blocks).tolist(),
        block=config.block,
        horizon=setting.horizon,
        vocab=target.vocab_size,
        ends=setting.ends,
        question=question,
        telling=chosen,
    )
    about = [
        {"id": each.id, "for": each.best_for, "cells": each.cells.count, "share": share}
        for each, share in zip(chosen, question.shares, strict=True)
    ]
    unseen = [name for name in names if name not in question.mistakes]
    console = terminal.console()
    terminal.show(console, plan_table(setting.name, target.name, powers, chosen, unseen))
    terminal.say(console, *plan_lines(running, config.level))
    ended = _gathered(config, running)
    found = {
        "log10_e": float(running.wealth.log_e[0] / np.log(10)),
        "p_value": running.p_value,
        "level": config.level,
        "outputs": running.outputs,
        "tokens": running.tokens,
        "planned": running.steps * running.block,
        "bets": dict(zip(running.wealth.bets, (running.wealth.logs[0] / np.log(10)).tolist(), strict=True)),
        "power": [asdict(each) for each in powers],
        "prompts": about,
    }
    table = verdict_table(setting.name, powers, running, config.level)
    return _end(setting, found, table, *verdict(setting.name, running, ended, config.level), ended)


def _greedy(setting: _Setting) -> Figures:
    config, sampling = setting.config, setting.sampling
    assistant = _assistant(config, setting.target, padded=True)
    engine = new_engine(config, setting.target, None, None)
    jobs = [Job(prompt, 0, ids, sampling) for prompt, ids in setting.prompts]
    plain = []
    with steps_shown("plain decoding") as say:
        for first in range(0, len(jobs), engine.max_batch_size):
            say(f"prompt {first + 1} of {len(jobs)}")
            some = jobs[first : first + engine.max_batch_size]
            plain += [list(done.token_ids) for done in engine.generate([job.prompt_ids for job in some], sampling)]
    wrong = _disagreements(assistant, [(job.prompt_ids, tokens) for job, tokens in zip(jobs, plain, strict=True)])
    terminal.say(
        terminal.console(),
        f"{len(jobs)} prompts, {sum(map(len, plain)):,} tokens of {setting.name} are compared with plain decoding's; a "
        f"rule that accepts whatever is drafted could show itself at {wrong:,} of them, where {config.assistant} "
        f"would draft another token.",
    )
    size = 1 if config.function is not None else engine.max_batch_size
    running = Greedy(setting.subject, engine, jobs, plain, size, setting.ends)
    ended = _gathered(config, running)
    found = {
        "prompts": running.done,
        "tokens": running.compared,
        "could_show": wrong,
        "differences": running.differences,
        "unexplained": len(running.unexplained),
    }
    verdict_of = greedy_verdict(setting.name, running, ended)
    return _end(setting, found, differences_table(setting.name, running), *verdict_of, ended)


@torch.inference_mode()
def _disagreements(assistant: torch.nn.Module, outputs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> int:
    """Output tokens in place of which a small model would have drafted another one."""
    wrong = 0
    for prompt, tokens in outputs:
        whole = torch.tensor([[*prompt, *tokens]], device=next(assistant.parameters()).device)
        best = assistant(whole).logits[0, len(prompt) - 1 : -1].argmax(-1)
        wrong += int((best != whole[0, len(prompt) :]).sum())
    return wrong


def _gathered(config: DictConfig, running: Audit) -> str | None:
    """Ask the subject until the audit ends; returns why it ended early."""
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / SAMPLES).exists():
        write_manifest(folder, plain_whole(config))
    with steps_shown("outputs") as say:
        return running.gather(folder, advance=say)


def _end(
    setting: _Setting, found: dict[str, Any], table: Table | None, said: str, bad: bool, ended: str | None
) -> Figures:
    """Write and print what was found; a bad end is an error."""
    word = "not lossless" if bad else "no sign of a mistake" if ended is None else "no verdict"
    figures = Figures(subject=setting.name, verdict=word, ended=ended, **found)
    publish(Path(setting.config.out), "audit", tables=[] if table is None else [table], figures=figures)
    if bad or ended is not None:
        raise ValueError(said)
    terminal.say(terminal.console(), said)
    return figures
