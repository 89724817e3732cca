"""The methods of a run: the drafter, rule, policy, target and engine that each has by its configuration."""

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from drafters.model import format_here
from experiments.config.kinds import check_arguments, did_you_mean
from experiments.config.sections import component_of, components_within, plain
from experiments.planning.drafting import plan_drafter, vocabulary_of
from experiments.planning.sources import choose_formats, inflated, read_config, shape_of
from experiments.results.manifest import revision_of
from experiments.results.records import PLAIN
from specdec.drafting.vocabulary import shared_tokens
from specdec.engine.engine import DEFAULT_MAX_LENGTH, Engine
from specdec.memory import free_memory
from specdec.physics.capacity import Served
from specdec.quantization.speed import AUTO
from specdec.target.loading import resolve_device

PARTS = ("target", "engine")
"""The sections of which a method may have settings of its own, in ``setups``."""
_SHARED = (("engine", "max_length"), ("target", "name"), ("target", "_target_"))
"""Settings in these that methods of one run have in common."""
_REQUIRED = ("target", "sampling", "dataset", "tracker")


@dataclass(frozen=True)
class Method:
    """A method by its configuration.

    Attributes:
        config: The whole configuration as this method has it: with its own settings of target and engine.
        drafter: The section of its drafter; None for plain decoding as the baseline.
    """

    name: str
    config: DictConfig
    drafter: str | None
    is_set_up: bool

    @property
    def rule(self) -> str:
        """The section of its acceptance rule: its own in ``rules``, or else ``verifier``."""
        return f"rules.{self.name}" if self.name in (self.config.get("rules") or ()) else "verifier"

    @property
    def policy(self) -> str | None:
        """The section of its policy: its own in ``policies``, or else ``policy``, if there is one."""
        if self.name in (self.config.get("policies") or {}):
            return f"policies.{self.name}"
        return "policy" if self.config.get("policy") else None

    @property
    def target(self) -> str:
        """The settings of its target as a text: methods of the same settings share one."""
        return _text(self.config, "target")

    @property
    def setup(self) -> str:
        """The settings of its target and its engine as a text."""
        return f"{self.target} {_text(self.config, 'engine')}"

    @property
    def distribution(self) -> str:
        """What decides about the distribution of outputs, drafter and rule apart: the target and the cache's format."""
        return f"{self.target} {self.config.engine.get('kv_cache')}"


def methods_of(config: DictConfig, drafters: Mapping[str, str | None]) -> list[Method]:
    """The methods of a run, plain decoding first.

    Args:
        drafters: Names, and the configuration sections of their drafters.
    """
    found = []
    for name, section in {PLAIN: None, **drafters}.items():
        own = name in (config.get("setups") or ())
        found.append(Method(name, _with_setup(config, name) if own else config, section, own))
    return found


def _with_setup(config: DictConfig, name: str) -> DictConfig:
    """The configuration with a method's own target and engine.

    References follow: a drafter with ``optimize: ${engine.optimize}`` gets the method's own value.
    """
    own = copy.deepcopy(config)
    with open_dict(own):
        for part, settings in (plain(config, f"setups.{name}") or {}).items():
            own[part] = OmegaConf.merge(own[part], settings or {})
    return own


def drafters_of(config: DictConfig) -> dict[str, str]:
    """The methods of a configuration and the sections of their drafters: the drafter, with every policy, or several."""
    several = {str(name): f"methods.{name}" for name in config.methods}
    return several or dict.fromkeys([str(name) for name in config.policies] or [config.method], "drafter")


def check_components(
    config: DictConfig,
    drafters: Mapping[str, str],
    others: Sequence[str] = ("target", "verifier", "sampling", "dataset", "tracker"),
) -> dict[str, str]:
    """Check the arguments of all components, and of what methods have of their own, before anything is made.

    Formats that are left to this machine (``quantization=auto``) are then chosen and written into the configuration, so
    that results have them, and a run that is resumed keeps them. Returns what they were chosen by, by section.
    """
    check_arguments(Engine, plain(config, "engine"), "engine", given_first=True)
    if PLAIN in drafters:
        raise ValueError(f"method={PLAIN} is what plain decoding beside it is called: give another name")
    kv_cache, contenders = config.engine.get("kv_cache"), list(config.get("contenders") or ())
    if kv_cache is not None and contenders:
        raise ValueError(
            f"engine.kv_cache={kv_cache} makes another target than the one that {', '.join(map(str, contenders))} "
            f"would decode with in full precision: give engine.kv_cache=null or leave the contenders out"
        )
    for section in (*drafters.values(), *others, *(["policy"] if config.get("policy") else [])):
        component, _ = component_of(config, section)
        if component is None and section in _REQUIRED:
            raise ValueError(f"{section}._target_=None: a run needs a {section}, give {section}=NAME")
        if section == "dataset" and isinstance(component, type) and not callable(getattr(component, "load", None)):
            raise ValueError(f"dataset._target_: {component.__name__} has no method load, which returns the prompts")
    for group, known in (("policies", drafters), ("rules", drafters), ("contenders", None)):
        for name in config.get(group) or ():
            if known is None and name in (PLAIN, *drafters):
                raise ValueError(f"contenders.{name}: a method of ours is called {name}: give another name")
            if known and name not in known:
                raise ValueError(f"{group}.{name}: there is no method {name!r}{did_you_mean(str(name), known)}")
            component_of(config, f"{group}.{name}")
    _check_setups(config, [PLAIN, *drafters])
    check_vocabularies(config, list(drafters.values()), text="dataset" in others)
    check_memory(config, list(drafters.values()))
    measured: dict[str, str] = {}
    for section in (part for whole in drafters.values() for part in components_within(config, whole)):
        component, options = component_of(config, section)
        runs = getattr(getattr(component, "__self__", component), "runs", None)
        if options.get("quantization") == AUTO and runs == "model":  # all others refuse that word
            scheme, said = format_here(**options)
            OmegaConf.select(config, section).quantization = scheme  # also where that refers to another section
            measured |= {section: f"{options['name']} drafts in {said}"} if said else {}
    return measured


def check_memory(config: DictConfig, sections: Sequence[str]) -> None:
    """Refuse a target with a drafter that do not fit into memory, by their files, before they are loaded."""
    target, engine = plain(config, "target"), plain(config, "engine")
    name, rows = target.get("name"), engine.get("max_batch_size")

    def served(section: str, scheme: str | None) -> Served:
        given = inflated(read_config(name, target.get("gguf_file")), target.get("inflate"))
        shape, kv_cache = shape_of(given, name), engine.get("kv_cache")
        formats = choose_formats(given, dtype=str(target.get("dtype")), quantization=scheme, kv_cache=kv_cache)
        planned = plan_drafter(plain(config, section), shape, formats)
        drafting = () if planned is None else planned.memory_of(0)
        return Served(shape=shape, precision=formats.precision, drafting=drafting)

    divided = target.get("device_map") or target.get("tensor_parallel")
    for section in () if divided or not isinstance(name, str) else sections:
        refusal = None
        with suppress(ValueError, OSError, TypeError, KeyError):  # files say nothing of it: loading says why
            whole, int4 = served(section, target.get("quantization")), served(section, "int4")
            known = min(whole.shape.max_length or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
            free = free_memory(resolve_device(target.get("device") or "auto"))
            refusal = whole.refusal(free, rows=rows, length=engine.get("max_length") or known, int4=int4)
        if refusal is not None:
            raise ValueError(f"{name} and {section} do not fit into memory: {refusal}")


def check_vocabularies(config: DictConfig, sections: Sequence[str], *, text: bool = True) -> None:
    """Refuse, by their files, a drafting model of another vocabulary, and for ``text`` a target without a tokenizer."""
    target = vocabulary_of(plain(config, "target"))
    for section in (part for whole in sections for part in components_within(config, whole)):
        component, options = component_of(config, section)
        if getattr(getattr(component, "__self__", component), "same_vocabulary", False):
            drafter = vocabulary_of(options)
            if drafter is not None and target is not None:
                shared_tokens(drafter.name, drafter.tokenizer, drafter.vocab_size, target)
    if text:
        check_text(target)


def check_text(target: Any) -> None:
    """Refuse a target (None: of which nothing is known yet) without a tokenizer."""
    if target is not None and target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer, and prompts are text: give target.tokenizer=FOLDER")


def _check_setups(config: DictConfig, known: Sequence[str]) -> None:
    """Check the settings that single methods have of their own."""
    setups = config.get("setups") or {}
    for name in map(str, setups):
        where = f"setups.{name}"
        if name not in known:
            raise ValueError(f"{where}: there is no method {name!r}{did_you_mean(name, known)}")
        given = plain(config, where) or {}
        if not isinstance(given, dict):
            raise ValueError(f"{where}={given!r}: give '{where}={{engine:{{optimize:false}}}}'")
        for part, settings in given.items():
            if part not in PARTS:
                raise ValueError(f"there is no {where}.{part}{did_you_mean(str(part), PARTS, f'{where}.')}")
            if settings is not None and not isinstance(settings, dict):
                raise ValueError(f"{where}.{part}={settings!r}: give settings, as in '{where}.{part}={{…}}'")
            for key in settings or {}:
                if key not in config[part]:
                    hint = did_you_mean(str(key), map(str, config[part]), f"{where}.{part}.")
                    raise ValueError(f"there is no {where}.{part}.{key}{hint}")
        for part, key in _SHARED:
            if key in (given.get(part) or {}):
                raise ValueError(
                    f"{where}.{part}.{key}: all methods decode the same tokens of the same prompts, give {part}.{key}"
                )
        own = _with_setup(config, name)
        check_arguments(Engine, plain(own, "engine"), f"{where}.engine", given_first=True)
        component_of(own, "target")
    if setups and config.get("contenders"):
        raise ValueError(
            "contenders and setups are both given, and contenders need one target and engine: leave one of them out"
        )


def revisions_of(config: DictConfig, drafters: Mapping[str, str]) -> dict[str, str | None]:
    """The revisions of the files that target and drafters were loaded from, by section; None where there are none."""
    found: dict[str, str | None] = {}
    for section in (each for whole in ("target", *drafters.values()) for each in components_within(config, whole)):
        options = plain(config, section)
        where = {key: options[key] for key in ("revision", "subfolder", "cache_dir") if options.get(key) is not None}
        name = options.get("name")
        found[section] = revision_of(name, **where) if isinstance(name, str) else None
    return found


def _text(config: DictConfig, part: str) -> str:
    return json.dumps(plain(config, part), sort_keys=True, default=str)
