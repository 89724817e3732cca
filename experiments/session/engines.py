"""Targets, drafters, rules and engines made as a configuration describes them, and all that are compared."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from omegaconf import DictConfig
from transformers.utils import logging as transformers_logging

from experiments.config.sections import build, in_sweep, plain
from experiments.contenders.base import OtherEngine
from experiments.measuring.accounting import Accountant
from experiments.measuring.conditions import conditions_of
from experiments.measuring.measure import Contender
from experiments.measuring.peaks import brief_peaks
from experiments.reporting.progress import phase
from experiments.results.records import PLAIN
from experiments.session.methods import Method, check_text, methods_of
from experiments.session.policies import COSTS, built_policy, paced, policy_of, settle_costs
from specdec.drafting.costs import RoundCosts, check_conditions
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.native import recommended_threads
from specdec.physics.calibrated import CalibratedRounds
from specdec.random import fresh_seed
from specdec.target.target import Target


def settle(config: DictConfig) -> None:
    """Draw the seed if it is left to chance, and apply what holds for the whole process; refuse a wrong ``out``."""
    check_out(config.get("out") or ".")
    if config.seed is None:
        config.seed = fresh_seed()
    torch.set_num_threads(config.threads or recommended_threads())
    quiet_hub()
    # Its warning about a long text comes once for all, and without a number: what does not fit is said by `fit`.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)


def check_out(out: str) -> None:
    """Refuse a folder that cannot be made or written to, before any work starts."""
    folder = Path(out).expanduser().absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"out={out}: {there} is no folder that can be written to")


def quiet_hub() -> None:
    """Print no progress of loading, and no attempt to reach the hub: what is raised at the end says it all."""
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def assemble(
    config: DictConfig, drafters: Mapping[str, str], *, samples: Sequence[str] = (), formats: Mapping[str, str] = {}
) -> tuple[Target, list[Contender]]:
    """The target and all contenders, the baseline first.

    Args:
        samples: Texts to measure the costs of rounds on, for a length policy that needs them.
        formats: What the formats of drafting models were chosen by, by section.

    Raises:
        ValueError: A model cannot be loaded, a drafter and the verifier do not fit, or the costs that a policy chooses
            by are of another device, dtype or model.
    """
    plainly, *others = methods_of(config, drafters)
    phase(f"loading {config.target.get('name') or 'the target'} and drafters", shown=not in_sweep())
    made = {
        each.name: paced(build(each.config, str(each.drafter)), built_policy(each.config, each.policy))
        for each in others
    }
    rules: dict[str, Verifier] = {each.name: build(config, each.rule) for each in others}
    others_too = config.get("contenders") or ()
    contenders: dict[str, OtherEngine] = {str(name): build(config, f"contenders.{name}") for name in others_too}
    targets = _targets([plainly, *others])
    for each in others:
        parts = made[each.name], rules[each.name], targets[each.target], samples
        said = [text for section, text in formats.items() if f"{section}.".startswith(f"{each.drafter}.")]
        said += settle_costs(*parts, each.config, f"{each.name}_{COSTS}" if len(others) > 1 else COSTS)
        if said and not in_sweep():
            print(f"{each.name}: {'; '.join(said)}", file=sys.stderr)
    phase("packing weights and allocating caches", shown=not in_sweep())
    engines = {
        each.name: new_engine(each.config, targets[each.target], made[each.name], rules[each.name]) for each in others
    }
    for engine in engines.values():
        known = getattr(policy_of(engine.drafter), "costs", None)
        if isinstance(known, RoundCosts | CalibratedRounds) and known.conditions is not None:
            here = conditions_of(engine.target, engine.runner, engine.drafter)
            check_conditions(known.conditions, here, "the policy's file")
    # Plain decoding runs on the first method's engine, unless that is another one than its own.
    first = others[0]
    shares = first.setup == plainly.setup
    target = targets[plainly.target]
    baseline = engines[first.name] if shares else new_engine(plainly.config, target, None, None)
    found = [Contender(PLAIN, baseline, speculate=False)]
    shown = [each for each in others if made[each.name] is not None or each.is_set_up]
    without = [plainly, *(each for each in shown if made[each.name] is None)]
    for each in shown:
        # Drafts on a quantized target have to equal plain decoding of that one. Plain decoding with settings of its own
        # is compared with nothing, because no rule promises anything about it.
        same = () if each in without else (other.name for other in without if other.distribution == each.distribution)
        compared = {"reference": next(iter(same), None), "other_target": each.distribution != plainly.distribution}
        found.append(Contender(each.name, engines[each.name], speculate=made[each.name] is not None, **compared))
    for name, other in contenders.items():
        other.bind(target, max_batch_size=baseline.max_batch_size, max_length=baseline.max_length)
        found.append(Contender(name, other))
    return target, found


def new_engine(config: DictConfig, target: Target, drafter: Drafter | None, verifier: Verifier | None) -> Engine:
    """An engine by the configuration's settings; without a drafter it needs no verifier."""
    options = plain(config, "engine")
    for name in ("scheduler", "cache"):
        options[name] = build(config, f"engine.{name}") if options.get(name) else None
    return Engine(target, drafter, verifier if drafter is not None else None, **options)


def accounted(contenders: Sequence[Contender]) -> list[Contender]:
    """The methods with what works out their calls; other engines than ours have none."""
    return [
        replace(contender, accountant=Accountant.of(contender.engine, speculate=contender.speculate))
        if isinstance(contender.engine, Engine)
        else contender
        for contender in contenders
    ]


def peaks_of(target: Target, before: Mapping[str, float] | None = None) -> Mapping[str, float]:
    """The best that the target's device does, now or ``before``: a busy machine makes it lower, and nothing higher."""
    now, then = asdict(brief_peaks(target.device, target.dtype)), before or {}
    return {**then, **{name: max(value, then.get(name, value)) for name, value in now.items()}}


def _targets(methods: Sequence[Method]) -> dict[str, Target]:
    """The targets of methods, by their settings."""
    made: dict[str, Target] = {}
    for method in methods:
        if method.target not in made:
            made[method.target] = build(method.config, "target")
            check_text(made[method.target])
    return made
