"""The components that a configuration names: their arguments, checked before any is made; revisions of their files."""

from collections.abc import Mapping, Sequence

from omegaconf import DictConfig

from experiments.config.checking import check_settings, did_you_mean
from experiments.config.sections import component_of, components_within, plain
from experiments.config.settings import ENGINE
from experiments.results.revision import revision_of


def check_components(
    config: DictConfig,
    methods: Mapping[str, str],
    others: Sequence[str] = ("target", "verifier", "sampling", "dataset", "tracker"),
) -> None:
    """Check the arguments of all components, before any of them is made.

    Args:
        config: The whole configuration.
        methods: Names, and the configuration sections of their drafters.
        others: The other sections that describe a component.

    Raises:
        ValueError: An argument is unknown, missing or of the wrong type.
    """
    check_settings(plain(config, "engine"), ENGINE, within="engine")
    _check_same_target(config)
    for section in (*methods.values(), *others, *(["policy"] if config.get("policy") else [])):
        component, _ = component_of(config, section)
        if component is None and section in ("target", "sampling", "dataset", "tracker"):
            raise ValueError(f"{section}._target_=None: a run needs a {section}, give {section}=NAME")
        if section == "dataset" and isinstance(component, type) and not callable(getattr(component, "load", None)):
            raise ValueError(f"dataset._target_: {component.__name__} has no method load, which returns the prompts")
    for name in config.get("policies") or ():
        if methods and name not in methods:
            raise ValueError(f"policies.{name}: there is no method {name!r}{did_you_mean(str(name), methods)}")
        component_of(config, f"policies.{name}")
    for name in config.get("rules") or ():
        if name not in methods:
            raise ValueError(f"rules.{name}: there is no method {name!r}{did_you_mean(str(name), methods)}")
        component_of(config, f"rules.{name}")
    for name in config.get("contenders") or ():
        component_of(config, f"contenders.{name}")


def rule_of(config: DictConfig, method: str) -> str:
    """Returns the section of a method's acceptance rule: its own in ``rules``, or else ``verifier``."""
    return f"rules.{method}" if method in (config.get("rules") or ()) else "verifier"


def _check_same_target(config: DictConfig) -> None:
    """Refuse to compare a target that has a quantized cache with other engines, whose target has none."""
    kv_cache, contenders = config.engine.get("kv_cache"), list(config.get("contenders") or ())
    if kv_cache is not None and contenders:
        raise ValueError(
            f"engine.kv_cache={kv_cache} makes another target than the one that {', '.join(map(str, contenders))} "
            f"would decode with in full precision: give engine.kv_cache=null or leave the contenders out"
        )


def revisions_of(config: DictConfig, methods: Mapping[str, str]) -> dict[str, str | None]:
    """The revisions of the files that target and drafters were loaded from, by section; None where there are none.

    Args:
        config: The whole configuration.
        methods: Names, and the configuration sections of their drafters.
    """
    found: dict[str, str | None] = {}
    for section in (each for whole in ("target", *methods.values()) for each in components_within(config, whole)):
        options = plain(config, section)
        where = {key: options[key] for key in ("revision", "subfolder", "cache_dir") if options.get(key) is not None}
        name = options.get("name")
        found[section] = revision_of(name, **where) if isinstance(name, str) else None
    return found
