"""Settings of the target and the engine that single methods of a run have of their own: ``setups``."""

import copy
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.config.checking import check_settings, did_you_mean
from experiments.config.sections import build, component_of, plain
from experiments.config.settings import ENGINE
from experiments.results.records import PLAIN

if TYPE_CHECKING:
    from specdec.target.target import Target

PARTS = ("target", "engine")
"""The sections of which a method may have settings of its own."""
_SHARED = (("engine", "max_length"), ("target", "name"), ("target", "_target_"))
"""Settings in these that methods of one run have in common."""


def has_setup(config: DictConfig, method: str) -> bool:
    """Returns whether a method differs from the others in its target or engine."""
    return method in (config.get("setups") or ())


def configuration_of(config: DictConfig, method: str) -> DictConfig:
    """Returns the configuration as one method has it: with its own settings of target and engine, if any.

    References follow: a drafter with ``optimize: ${engine.optimize}`` gets the method's own value.
    """
    if not has_setup(config, method):
        return config
    own = copy.deepcopy(config)
    with open_dict(own):
        for part, settings in (plain(config, f"setups.{method}") or {}).items():
            own[part] = OmegaConf.merge(own[part], settings or {})
    return own


def check_setups(config: DictConfig, methods: Iterable[str]) -> None:
    """Check the settings that single methods have of their own, before anything is loaded.

    Raises:
        ValueError: A method or setting does not exist or is wrong, or something else of the run needs one target.
    """
    known = {PLAIN: None, **dict.fromkeys(methods)}
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
        own = configuration_of(config, name)
        check_settings(plain(own, "engine"), ENGINE, within=f"{where}.engine")
        component_of(own, "target")
    for setting in ("contenders", "costs") if setups else ():
        if config.get(setting):
            raise ValueError(
                f"{setting} and setups are both given, and {setting} need one target and engine: leave one of them out"
            )


def same_setup(config: DictConfig, one: str, other: str) -> bool:
    """Returns whether two methods have the same target and the same engine."""
    return all(_text(config, one, part) == _text(config, other, part) for part in PARTS)


def same_law(config: DictConfig, one: str, other: str) -> bool:
    """Returns whether two methods have the same target law: the same weights, and a cache of the same precision."""
    return _law(config, one) == _law(config, other)


def targets_of(config: DictConfig, methods: Sequence[str]) -> "dict[str, Target]":
    """Returns the target of every method; those with the same settings share one.

    Raises:
        ValueError: One cannot be loaded, or has no tokenizer.
    """
    made: dict[str, Target] = {}
    found: dict[str, Target] = {}
    for name in methods:
        key = _text(config, name, "target")
        if key not in made:
            made[key] = build(configuration_of(config, name), "target")
            if made[key].tokenizer is None:
                raise ValueError(f"{made[key].name} has no tokenizer, and the prompts of a dataset are text")
        found[name] = made[key]
    return found


def reference_of(config: DictConfig, method: str, plainly: Sequence[str]) -> str | None:
    """Returns the method whose greedy outputs another one's have to equal; None where nothing is to be compared.

    What is drafted on a quantized target has to equal plain decoding of the quantized one. Plain decoding with settings
    of its own is compared with nothing, because no rule promises anything about it.

    Args:
        config: The whole configuration.
        method: The method.
        plainly: The methods that decode plainly, the baseline first.
    """
    if method in plainly:
        return None
    return next((name for name in plainly if same_law(config, name, method)), None)


def _law(config: DictConfig, method: str) -> str:
    """What decides about a method's output law, its drafter and rule apart: the target, and the cache's precision."""
    return f"{_text(config, method, 'target')} {plain(configuration_of(config, method), 'engine').get('kv_cache')}"


def _text(config: DictConfig, method: str, part: str) -> str:
    return json.dumps(plain(configuration_of(config, method), part), sort_keys=True, default=str)
