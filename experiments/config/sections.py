"""Hydra's configuration: where it lives, and how a section of it becomes a component."""

import dataclasses
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from experiments.config.checking import check_arguments, check_settings
from experiments.config.pairs import check_choices
from experiments.config.settings import ENGINE, SLA
from experiments.config.values import Check

if TYPE_CHECKING:
    from experiments.results.statistics import Bootstrap

Made = TypeVar("Made")

_SECTIONS = {"engine": ENGINE, "sla": SLA}
"""Sections that are no component, and their settings."""


def _find_conf() -> Path:
    """``conf/`` at the root of a clone, ``experiments/conf`` in an installed wheel."""
    package = Path(__file__).parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "run.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no configuration beside {package}: reinstall the package, or run inside a clone")


CONF = _find_conf()
"""Absolute path of the configuration folder, for ``@hydra.main(config_path=str(CONF), …)``."""


def settings_of(config: DictConfig, known: dict[str, Check]) -> dict[str, Any]:
    """The resolved settings of an application, after a check.

    Raises:
        ValueError: A setting is unknown, missing or wrong.
    """
    given = {
        str(name): {} if OmegaConf.is_dict(config._get_node(name)) else plain(config, str(name)) for name in config
    }
    check_settings(given, known)
    return given


def plain(config: DictConfig, section: str) -> Any:
    """A resolved section or value as Python's own types.

    Raises:
        ValueError: Something in it has no value.
    """
    if OmegaConf.is_missing(config, section):
        raise ValueError(f"{section} has no value: give {section}=…")
    value = OmegaConf.select(config, section)
    if not OmegaConf.is_config(value):
        return value
    for key in sorted(OmegaConf.missing_keys(value)):
        raise ValueError(f"{key} has no value: give {key}=…")
    return OmegaConf.to_container(value, resolve=True)


def check_early(config: DictConfig, known: dict[str, Check]) -> None:
    """Check all of an application's configuration that needs no component's class.

    An entry point calls this before it imports anything heavy, so that a typing error is answered at once and not
    after the seconds that PyTorch takes to load. What the components themselves take is checked once they are imported.

    Raises:
        ValueError: A setting is unknown, missing or wrong, or something in a section has no value.
    """
    check_choices()
    settings_of(config, known)
    for name in config:
        if OmegaConf.is_dict(config._get_node(name)):
            options = plain(config, str(name))
            if name in _SECTIONS:
                check_settings(options, _SECTIONS[str(name)], within=str(name))
            check_module(options, str(name))


def check_module(options: Mapping[Any, Any], section: str) -> None:
    """Check that the module of a section's component exists, without importing it.

    Raises:
        ValueError: There is no module or package of that name.
    """
    target = options.get("_target_")
    if target is None:
        return
    setting = f"{section}._target_={target!r}"
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        raise ValueError(f"{setting}: give the dotted name of a class, such as my_module.MyClass")
    top = target.partition(".")[0]
    if top not in sys.modules and find_spec(top) is None:
        raise ValueError(
            f"{setting}: there is no module {top!r}; if it is a file of yours, run in its folder or put that folder on "
            f"PYTHONPATH"
        )


def bootstrap_of(config: DictConfig) -> "Bootstrap":
    """The section ``bootstrap`` as settings of intervals.

    Raises:
        ValueError: A value is of the wrong type, or out of range.
    """
    from experiments.results.statistics import Bootstrap

    options = plain(config, "bootstrap")
    check_arguments(Bootstrap, options, "bootstrap")
    return Bootstrap(**options)


def typed(kind: type[Made], options: dict[str, Any], within: str = "") -> Made:
    """A dataclass from plain settings, with the dataclasses in its fields.

    Args:
        kind: The dataclass.
        options: Its fields, by name.
        within: Name of the section, for messages.

    Raises:
        ValueError: A field is unknown, missing or of the wrong type.
    """
    check_arguments(kind, options, within)
    prefix = f"{within}." if within else ""
    made: dict[str, Any] = {}
    for field in dataclasses.fields(cast(Any, kind)):
        name = f"{prefix}{field.name}"
        if field.name in options:
            value = options[field.name]
            inner = isinstance(field.type, type) and dataclasses.is_dataclass(field.type)
            made[field.name] = typed(cast(Any, field.type), value, name) if inner else value
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{name} is missing: give {name}=…")
    return kind(**made)


def component_of(config: DictConfig, section: str) -> tuple[Any, dict[str, Any]]:
    """The class or function that a section names, and its arguments, checked; None and nothing where it is null.

    Raises:
        ValueError: An argument is unknown, missing or of the wrong type, or the class lacks a method.
    """
    options = plain(config, section)
    if not isinstance(options, dict):
        raise ValueError(f"{section}={options!r}: give '{section}={{_target_:my_module.MyClass}}'")
    if options.get("_target_") is None:
        return None, {}
    # Here, because they import torch and numpy.
    from experiments.config.locate import check_complete, locate
    from specdec.attributes import missing_methods

    component = locate(options["_target_"], section)
    owner: Any = getattr(component, "__self__", component)  # the class, or that of a class method
    lacking = missing_methods(owner)
    if lacking is not None:
        raise ValueError(f"{section}: {lacking}")
    # The name is checked where it is used: every loader has a word of its own for it.
    arguments = {key: value for key, value in options.items() if not (key == "name" and _loads(options))}
    check_arguments(component, arguments, section)
    check_complete(component, arguments, section, given_first=_loads(options))
    for part in _parts(options):
        component_of(config, f"{section}.{part}")
    return component, options


def components_within(config: DictConfig, section: str) -> list[str]:
    """The dotted names of a component's section and of the sections of all components that it is made of."""
    options = plain(config, section)
    parts = _parts(options) if isinstance(options, dict) else []
    return [section, *(name for part in parts for name in components_within(config, f"{section}.{part}"))]


def build(config: DictConfig, section: str) -> Any:
    """Instantiate a section of the configuration with ``_target_``; None where that is null.

    ``name`` of anything that is loaded with ``from_pretrained`` is its first argument, whatever that one calls it:
    so ``target.name=…`` and ``drafter.name=…`` are the same for all.

    Args:
        config: The whole, so that references between sections resolve.
        section: Dotted name of the section.

    Raises:
        ValueError: A value is of the wrong type, or the component refuses its arguments.
    """
    component, options = component_of(config, section)
    if component is None:
        return None
    return instantiate(_named_first(options), _convert_="all")


def _parts(options: dict[str, Any]) -> list[str]:
    """The arguments that are components themselves."""
    return [key for key, value in options.items() if isinstance(value, dict) and value.get("_target_") is not None]


def _named_first(options: dict[str, Any]) -> dict[str, Any]:
    """A component's section, and those within it, as Hydra takes it: with the ``name`` as the first argument."""
    parts = {key: _named_first(options[key]) for key in _parts(options)}
    if not _loads(options):
        return options | parts
    return {key: value for key, value in options.items() if key != "name"} | parts | {"_args_": [options["name"]]}


def _loads(options: dict[str, Any]) -> bool:
    return options["_target_"].endswith(".from_pretrained") and "name" in options
