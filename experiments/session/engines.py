"""What a configuration describes, made: the target, drafters, rules, engines, and all that are compared."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig
from transformers.utils import logging as transformers_logging

from experiments.config.sections import build, plain
from experiments.contenders.base import OtherEngine
from experiments.measuring.measure import Contender
from experiments.results.records import PLAIN
from experiments.session.components import rule_of
from experiments.session.pacing import Policy, paced, settle_costs
from experiments.session.setups import (
    configuration_of,
    has_setup,
    reference_of,
    same_law,
    same_setup,
    targets_of,
)
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.machine import recommended_threads
from specdec.random import fresh_seed
from specdec.target.target import Target


def settle(config: DictConfig) -> None:
    """Draw the seed if it is left to chance, and apply what holds for the whole process."""
    if config.seed is None:
        config.seed = fresh_seed()
    torch.set_num_threads(config.threads or recommended_threads())
    transformers_logging.disable_progress_bar()
    # It reports every attempt to reach the hub, and what it raises at the end says it all.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    # Its warning about a long text comes once for all, and without a number: what does not fit is said by `fit`.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)


def assemble(
    config: DictConfig, methods: Mapping[str, str], *, samples: Sequence[str] = ()
) -> tuple[Target, list[Contender]]:
    """The target and all contenders, the baseline first.

    Args:
        config: The whole configuration.
        methods: Names, and the configuration sections of their drafters.
        samples: Texts to measure the costs of rounds on, for a length policy that needs them.

    Raises:
        ValueError: A model cannot be loaded, or a drafter and the verifier do not fit.
    """
    own = {name: configuration_of(config, name) for name in methods}
    drafters = {name: paced(build(own[name], section), _policy(config, name)) for name, section in methods.items()}
    verifiers = {name: build(config, rule_of(config, name)) for name in methods}
    others: dict[str, OtherEngine] = {str(name): build(config, f"contenders.{name}") for name in config.contenders}
    targets = targets_of(config, [PLAIN, *methods])
    for name in methods:
        settle_costs(
            drafters[name],
            verifiers[name],
            targets[name],
            samples,
            max_batch_size=own[name].engine.max_batch_size,
            folder=Path(config.out),
            method=name if len(methods) > 1 else "",
        )
    engines = {name: new_engine(own[name], targets[name], drafters[name], verifiers[name]) for name in methods}
    # Plain decoding runs on the first method's engine, unless that is another one than its own.
    first = next(iter(engines))
    shares = same_setup(config, PLAIN, first)
    baseline = engines[first] if shares else new_engine(configuration_of(config, PLAIN), targets[PLAIN], None, None)
    contenders = [Contender(PLAIN, baseline, speculate=False)]
    plainly = [PLAIN, *(name for name, drafter in drafters.items() if drafter is None and has_setup(config, name))]
    contenders += [
        Contender(
            name,
            engine,
            speculate=engine.drafter is not None,
            reference=reference_of(config, name, plainly),
            other_target=not same_law(config, name, PLAIN),
        )
        for name, engine in engines.items()
        if engine.drafter is not None or has_setup(config, name)
    ]
    size, length = contenders[0].engine.max_batch_size, contenders[0].engine.max_length
    for name, other in others.items():
        other.bind(targets[PLAIN], max_batch_size=size, max_length=length)
        contenders.append(Contender(name, other))
    return targets[PLAIN], contenders


def _policy(config: DictConfig, method: str) -> Policy | None:
    """A new policy for every drafter, whose state it keeps: the method's own, if it has one."""
    if method in (config.get("policies") or {}):
        return build(config, f"policies.{method}")
    return build(config, "policy") if config.get("policy") else None


def new_engine(config: DictConfig, target: Target, drafter: Drafter | None, verifier: Verifier | None) -> Engine:
    """An engine by the configuration's settings; without a drafter it needs no verifier."""
    options = plain(config, "engine")
    options["scheduler"] = build(config, "engine.scheduler") if options.get("scheduler") else None
    return Engine(target, drafter, verifier if drafter is not None else None, **options)
