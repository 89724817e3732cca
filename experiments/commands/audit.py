"""An audit by a checked configuration: the prompts, the plan, the outputs, and the verdict."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from experiments.config.kinds import did_you_mean
from experiments.config.pairs import check_files
from experiments.config.sections import build, locate, plain_whole
from experiments.datasets.prompt import Prompt, choose
from experiments.measuring.gathered import (
    SAMPLES,
    AgainstLaw,
    AgainstReference,
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
    shift_table,
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
from specdec import bundled
from specdec.checks.betting import Power, power
from specdec.checks.mistakes import MISTAKES
from specdec.checks.telling import planned, telling
from specdec.checks.two_samples import smallest_seen
from specdec.engine.text import encode_prompt
from specdec.requests import SamplingParams
from specdec.target.loading import find_tokenizer, load
from specdec.target.target import Target

LAW, PLAIN = "law", "plain"
"""The references that need no other engine: the law by the target's own weights, and our engine without a drafter."""
UNKNOWN = ("logits_processor", "grammar", "adapter")
"""Settings of the sampling that change the target's law, and that ``Place.of`` leaves out."""


@dataclass(frozen=True)
class _Setting:
    """A subject, the engine that it is held against, and the requests of both.

    Attributes:
        reference: Stands in place of the law, which is None.
        horizon: Tokens of an output that are looked at.
    """

    config: DictConfig
    target: Target
    name: str
    subject: Subject
    reference: Subject | None
    sampling: SamplingParams
    prompts: list[tuple[Prompt, tuple[int, ...]]]
    horizon: int
    ends: frozenset[int]

    @property
    def shared(self) -> dict[str, Any]:
        """Arguments of every audit of sampled outputs."""
        names = ("subject", "sampling", "horizon", "ends")
        given = {name: getattr(self, name) for name in names}
        return {**given, "block": self.config.block, "vocab": self.target.vocab_size}


def audit(config: DictConfig) -> Figures:
    """Audit the subject of a checked configuration; a subject that is not lossless is an error."""
    begun(config, kind="audit", begins=SAMPLES)
    settle(config)
    check_components(config, {"": "drafter"}, ("target", "verifier", "sampling", "dataset"))
    for name in config.mistakes or ():
        if name not in MISTAKES:
            raise ValueError(f"mistakes: there is no {name!r}{did_you_mean(name, MISTAKES)}")
    sampling: SamplingParams = replace(build(config, "sampling"), n=1)
    if sampling.greedy and config.reference not in (LAW, PLAIN):
        raise ValueError(
            f"sampling.temperature=0 with reference={config.reference}: the target's logits tell whether a difference "
            f"is rounding, so greedy outputs are compared with our engine's: leave the reference out"
        )
    beyond = [name for name in UNKNOWN if getattr(sampling, name) != getattr(SamplingParams(), name)]
    if beyond and config.reference == LAW and not sampling.greedy:
        raise ValueError(
            f"sampling.{beyond[0]}={getattr(sampling, beyond[0])} with reference={LAW}: the law is computed without "
            f"it, so leave it out, or give reference={PLAIN}"
        )
    check_files(config)
    target, name, subject, reference = _sides(config)
    horizon = config.horizon or max(2, config.undrafted + config.drafted + 1)
    setting = _Setting(
        config,
        target,
        name,
        subject,
        reference,
        # The last token of an output is not drafted by every engine.
        sampling if sampling.greedy else replace(sampling, max_new_tokens=horizon + 1),
        [
            (prompt, tuple(encode_prompt(target.tokenizer, prompt.turns[0])[-config.context :]))
            for prompt in choose(build(config, "dataset"))[0]
        ],
        horizon,
        frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else target.eos_token_ids),
    )
    if sampling.greedy:
        return _greedy(setting)
    return _sampled(setting, *(_against_law if reference is None else _against_reference)(setting))


def _sides(config: DictConfig) -> tuple[Target, str, Subject, Subject | None]:
    """The target, the subject with its name, and the reference, unless that is the law."""
    others = {str(name): build(config, f"contenders.{name}") for name in config.contenders}
    second = others.pop(config.reference, None)
    function = None if config.function is None else locate(config.function, "function")
    if len(others) + (function is not None) > 1:
        raise ValueError("several subjects are given: give one contender, or a function, besides the reference")
    named = second is None and config.reference not in (LAW, PLAIN)
    if named and "." not in config.reference:
        raise ValueError(f"reference={config.reference}: give {LAW}, {PLAIN}, the name of a contender or of a function")
    plain = locate(config.reference, "reference") if named else None
    engines = [*others.values(), *([] if second is None else [second])]
    foreign = config.reference not in (LAW, PLAIN) and bool(others or function is not None)
    light = foreign and not any(getattr(each, "needs_weights", True) for each in engines)
    target: Target = _without_weights(config.target.name) if light else build(config, "target")
    size = config.engine.max_batch_size
    for each in engines:
        each.bind(target, max_batch_size=size, max_length=config.engine.max_length)
    reference = None
    if second is not None:
        reference = of_engine(second, size)
    elif plain is not None:
        reference = of_function(plain, config.reference)
    elif config.reference == PLAIN:
        reference = of_engine(new_engine(config, target, None, None), size)
    if function is not None:
        return target, str(config.function), of_function(function, str(config.function)), reference
    for name, other in others.items():
        return target, name, of_engine(other, size), reference
    verifier, drafter = build(config, "verifier"), paced(build(config, "drafter"), build(config, "policy"))
    name = "plain decoding" if drafter is None else f"{type(drafter).__name__} with {type(verifier).__name__}"
    return target, name, of_engine(new_engine(config, target, drafter, verifier), size), reference


def _without_weights(name: str) -> Target:
    """The target's tokenizer and the tokens that end its output: nothing else is needed where others decode."""
    folder = bundled.resolve(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder)
    except OSError:  # then its configuration says it
        pass
    return Target(model, find_tokenizer(name), name=name)


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


_Plan = tuple[Sampled, list[Power], Table, list[dict[str, Any]]]
"""A sampled audit before it begins: its power, as a table too, and what is noted of its prompts."""


def _against_law(setting: _Setting) -> _Plan:
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
    running = AgainstLaw(
        prompts=[each.ids for each in chosen],
        order=question.order(blocks).tolist(),
        question=question,
        telling=chosen,
        **setting.shared,
    )
    about = [
        {"id": each.id, "for": each.best_for, "cells": each.cells.count, "share": share}
        for each, share in zip(chosen, question.shares, strict=True)
    ]
    unseen = [name for name in names if name not in question.mistakes]
    return running, powers, plan_table(setting.name, target.name, powers, chosen, unseen), about


def _against_reference(setting: _Setting) -> _Plan:
    config, prompts = setting.config, setting.prompts[: setting.config.prompts]
    with steps_shown("power") as say:
        say("simulated audits")
        powers, blocks = smallest_seen(
            config.shift,
            blocks=max(config.max_samples // (2 * config.block), 1),
            wanted=config.wanted,
            seed=config.seed,
            prompts=len(prompts),
            horizon=setting.horizon,
            level=config.level,
            block=config.block,
        )
    assert setting.reference is not None, "else it is compared with the law"
    running = AgainstReference(
        prompts=[ids for _, ids in prompts],
        order=(np.arange(blocks) % len(prompts)).tolist(),
        reference=setting.reference,
        level=config.level,
        **setting.shared,
    )
    table = shift_table(setting.name, config.reference, powers)
    return running, powers, table, [{"id": prompt.id} for prompt, _ in prompts]


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


def _sampled(
    setting: _Setting, running: Sampled, powers: list[Power], plan: Table, prompts: list[dict[str, Any]]
) -> Figures:
    config, console = setting.config, terminal.console()
    terminal.show(console, plan)
    terminal.say(console, *plan_lines(running, config.level))
    ended = _gathered(config, running)
    found = {
        "reference": config.reference,
        "log10_e": float(running.wealth.log_e[0] / np.log(10)),
        "p_value": running.p_value,
        "level": config.level,
        "outputs": running.outputs,
        "tokens": running.tokens,
        "planned": running.steps * running.block,
        "bets": dict(zip(running.wealth.bets, (running.wealth.logs[0] / np.log(10)).tolist(), strict=True)),
        "power": [asdict(each) for each in powers],
        "prompts": prompts,
    }
    table = verdict_table(setting.name, powers, running, config.level)
    return _end(setting, found, table, *verdict(setting.name, running, ended, config.level), ended)


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
