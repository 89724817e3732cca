"""Which traced drafts a tree is optimized for, and with what it is measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.config.kinds import did_you_mean
from experiments.config.sections import build, listed, plain, sections
from experiments.results.origin import read_manifest
from experiments.results.runs import find_folders
from experiments.tracing.draft_sets import DraftSet, find_drafts
from specdec.interfaces import Verifier
from specdec.shape import TreeShape

_SECTIONS = ("target", "drafter", "verifier", "sampling", "dataset", "engine")


@dataclass(frozen=True)
class Traced:
    """The drafts of one method, and the run that made them.

    Attributes:
        sets: The drafts of every temperature.
        config: The configuration of the (first) run, with the drafter at its top.
    """

    sets: Mapping[float, Sequence[DraftSet]]
    config: DictConfig
    manifest: Mapping[str, Any]
    rule: Verifier


def read_traces(config: DictConfig) -> Traced:
    """Find the drafts that the configuration's traces have of its method.

    Raises:
        ValueError: There is no trace, or it has several methods, or runs of several drafters.
    """
    folders = find_folders(listed(config, "trace"))
    manifests = [read_manifest(folder) for folder in folders]
    sets = [drafts for folder in folders for drafts in find_drafts(folder)]
    methods = list(dict.fromkeys(drafts.method for drafts in sets))
    method = config.method if config.method is not None else methods[0]
    if config.method is None and len(methods) > 1:
        raise ValueError(f"the trace has drafts of {', '.join(methods)}: give method=NAME")
    if method not in methods:
        raise ValueError(f"method={method!r}: the trace has no such method{did_you_mean(str(method), methods)}")
    drafters = [_drafter_of(manifest["config"], method) for manifest in manifests]
    known = [drafter for drafter in drafters if drafter is not None]
    for each in known[1:]:
        different = sorted(key for key in {*known[0], *each} - {"shape"} if known[0].get(key) != each.get(key))
        if different:
            name = different[0]
            raise ValueError(
                f"the traces are of different drafters (drafter.{name} is {known[0].get(name)!r} and "
                f"{each.get(name)!r}): optimize each by itself"
            )
    rules = [manifest["config"]["verifier"] for manifest in manifests]
    if any(rule != rules[0] for rule in rules[1:]):
        raise ValueError("the traces are of different acceptance rules, whose rates differ: optimize each by itself")
    first = OmegaConf.create({**manifests[0]["config"], "drafter": known[0]})
    by_temperature: dict[float, list[DraftSet]] = {}
    for drafts in sets:
        if drafts.method == method:
            by_temperature.setdefault(drafts.temperature, []).append(drafts)
    rule = build(OmegaConf.create({"verifier": rules[0]}), "verifier")
    return Traced(by_temperature, first, manifests[0], rule)


def _drafter_of(config: Mapping[str, Any], method: str) -> dict[str, Any] | None:
    """The drafter's section in a traced run's configuration; None if the run has no such method."""
    if config.get("methods"):
        return config["methods"].get(method)
    return config["drafter"]


def old_shape(given: Any, traced: DictConfig) -> Any:
    """What ``drafter.shape`` is without this optimization: as given, or in the drafter's file, or as it was traced."""
    if "shape" not in traced.drafter:
        raise ValueError(
            f"{traced.drafter.get('_target_')} takes no shape of its own: optimize the shape of the drafter that it is "
            f"made of, in a run of that one"
        )
    if given is not None:
        made = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
        TreeShape.of(made)  # type: ignore[arg-type]
        return made
    for section in sections("drafter", None).values():
        if section.get("_target_") == traced.drafter.get("_target_"):
            return plain(OmegaConf.create({"shape": section.get("shape")}), "shape")
    return plain(traced, "drafter.shape")


def changed_run(config: DictConfig, traced: Traced, temperature: float) -> DictConfig:
    """The traced run's configuration with what the command line changes, at one temperature."""
    made = OmegaConf.create({name: traced.config[name] for name in traced.config})
    for name in _SECTIONS:
        made[name] = OmegaConf.merge(made.get(name) or {}, config[name])
    made.sampling.temperature = temperature
    made.threads, made.resume, made.trace = config.threads, False, False
    made.policy = None
    made.tracker, made.contenders = sections("tracker", "none")["none"], {}
    return made
