"""Sections of a configuration: where ``conf/`` is, the options of its groups, and how a section becomes a component.

The options of a group are along Hydra's search path: the folder of ``--config-dir``, the package's ``conf``, and the
folders of ``hydra.searchpath``.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from experiments.config.kinds import check_arguments, did_you_mean, in_words

if TYPE_CHECKING:
    from experiments.results.statistics import Bootstrap

Made = TypeVar("Made")


def _find_conf() -> Path:
    """``conf/`` at the root of a clone, ``experiments/conf`` in an installed wheel."""
    package = Path(__file__).parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "run.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no configuration beside {package}: reinstall the package, or run inside a clone")


CONF = _find_conf()
"""Absolute path of the configuration folder, for ``@hydra.main(config_path=str(CONF), …)``."""
TABLES = {
    path.stem: cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))
    for path in sorted((CONF / "options").glob("*.yaml"))
}
"""The groups whose options stand in one file, ``conf/options/GROUP.yaml``, each under its name."""
_SECTIONS = ["contenders", "fit", "labels", "lengths", "methods", "policies", "rules", "served", "setups", "sla"]
"""The sections of commands that are no groups."""
_PACKAGES = {"pair": "_global_", "recipe": "_global_", "tree": "drafter"}
for _group, _options in TABLES.items():
    for _name, _option in _options.items():
        ConfigStore.instance().store(group=_group, name=_name, node=_option, package=_PACKAGES.get(_group))


def in_sweep() -> bool:
    """Whether this is a job of a sweep, of which the sweep says a line and nothing more."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def sweep_folder() -> Path | None:
    """The folder of the sweep that this is a job of; None outside of one."""
    return Path(HydraConfig.get().sweep.dir) if in_sweep() else None


def job_overrides() -> list[str]:
    """The overrides that the command or job was given."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def choice(group: str) -> str | None:
    """The option that was chosen of a group; None where there is none."""
    return HydraConfig.get().runtime.choices.get(group) if HydraConfig.initialized() else None


def check_pair() -> None:
    """Refuse another target or drafter beside ``pair=NAME``, whose names would be given to it."""
    pair = choice("pair")
    for group, wanted in choices_of(TABLES["pair"].get(pair or "", {})).items():
        if choice(group) != wanted:
            raise ValueError(
                f"pair={pair} brings its own {group}, and {group}={choice(group)} is chosen beside it: leave "
                f"one out (target=hf target.name=… takes the pair's target for another drafter)"
            )


def choices_of(pair: Mapping[str, Any]) -> dict[str, str]:
    """The options of target and drafter that a pair chooses, by group."""
    chosen = [(str(key).rpartition("/")[2], name) for entry in pair.get("defaults", ()) for key, name in entry.items()]
    return {group: name for group, name in chosen if group in ("target", "drafter")}


def option_names(group: str) -> list[str]:
    """The names that ``group=…`` accepts."""
    with _hydra() as further:
        return sorted(GlobalHydra.instance().config_loader().get_group_options(group, overrides=further))


def sections(group: str, given: Any) -> dict[str, DictConfig]:
    """Several components of one group, each as the section that describes it, by a label.

    Args:
        given: A list, or a single entry: the name of an option; ``{name: OPTION, argument: value, …}`` for an option
            with other arguments; ``{_target_: package.module.Class, argument: value, …}`` for a class that has no
            file. None for all options.

    Raises:
        ValueError: There is no such option, or an entry is neither.
    """
    names = option_names(group)
    entries = names if given is None else given if isinstance(given, list) else [given]
    read = [dict(entry) if isinstance(entry, Mapping) else {"name": entry} for entry in entries]
    for entry in read:
        if ("name" in entry) == ("_target_" in entry):
            raise ValueError(f"{entry!r} is no {group}: give {{name: NAME, …}} or {{_target_: package.Class, …}}")
        if (name := entry.get("name")) not in (*names, None):
            raise ValueError(f"there is no {group} {name!r}{did_you_mean(str(name), names)}")
    chosen = sorted({entry["name"] for entry in read if "name" in entry})
    with _hydra() as further:  # together, because Hydra takes its time for every composition
        options = [f"+{group}@option{number}={name}" for number, name in enumerate(chosen)]
        composed = compose(overrides=[*options, *further])
    found: dict[str, DictConfig] = {}
    for entry in read:
        name = entry.pop("name", None)
        section = OmegaConf.create({} if name is None else composed[f"option{chosen.index(name)}"])
        OmegaConf.set_struct(section, False)
        section = OmegaConf.merge(section, entry)
        name = name or str(entry.pop("_target_")).rpartition(".")[2]
        found[", ".join([name, *(f"{key}={value}" for key, value in entry.items())])] = cast(DictConfig, section)
    return found


@contextmanager
def _hydra() -> Iterator[list[str]]:
    """The application that runs, or else the package's own configuration, and the override with its search path."""
    searchpath = HydraConfig.get().searchpath if HydraConfig.initialized() else ()
    quoted = ["'" + str(folder).replace("\\", "\\\\").replace("'", "\\'") + "'" for folder in searchpath]
    further = [f"hydra.searchpath=[{','.join(quoted)}]"] if quoted else []
    if GlobalHydra.instance().is_initialized():
        yield further
    else:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield further


def check_settings(config: DictConfig, settings: type[Made]) -> Made:
    """A command's settings, after all checks that need no component's class.

    Raises:
        ValueError: A setting is unknown, missing or wrong, or settings contradict each other.
    """
    kinds = {field.name: field.type for field in fields(cast(Any, settings))}
    for name in map(str, config):
        if OmegaConf.is_missing(config, name):
            raise ValueError(f"{name} has no value: give {name}=…, {in_words(kinds.get(name))}")
    return typed(settings, values_of(settings, plain_whole(config)))


def values_of(settings: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without the sections that a command's settings leave to their components."""
    own = {field.name for field in fields(settings)}
    parts = {name for name, value in options.items() if isinstance(value, dict) and name not in own}
    left = {name for name in parts if name in _SECTIONS or option_names(name)}
    return {name: value for name, value in options.items() if name not in left}


def plain(config: DictConfig, section: str) -> Any:
    """A resolved section or value as Python's own types. Raises ValueError: something in it has no value."""
    if OmegaConf.is_missing(config, section):
        raise ValueError(f"{section} has no value: give {section}=…")
    value = OmegaConf.select(config, section)
    if not OmegaConf.is_config(value):
        return value
    for key in sorted(OmegaConf.missing_keys(value)):
        raise ValueError(f"{key} has no value: give {key}=…")
    return OmegaConf.to_container(value, resolve=True)


def plain_whole(config: DictConfig) -> dict[str, Any]:
    """The whole resolved configuration as Python's own types."""
    return {str(name): plain(config, str(name)) for name in config}


def listed(config: DictConfig, name: str) -> list[Any]:
    """A setting that is one value or several, as a list."""
    given = plain(config, name)
    return given if isinstance(given, list) else [given]


def bootstrap_of(config: DictConfig) -> "Bootstrap":
    """The section ``bootstrap`` as settings of intervals."""
    from experiments.results.statistics import Bootstrap

    return typed(Bootstrap, plain(config, "bootstrap"), "bootstrap")


def typed(kind: type[Made], options: dict[str, Any], within: str = "") -> Made:
    """A dataclass from plain settings, with the dataclasses in its fields.

    Raises:
        ValueError: A field is unknown, missing or of the wrong type.
    """
    check_arguments(kind, options, within)
    prefix = f"{within}." if within else ""
    inner = {
        field.name: typed(cast(Any, field.type), options[field.name], f"{prefix}{field.name}")
        for field in fields(cast(Any, kind))
        if is_dataclass(field.type) and isinstance(options.get(field.name), dict)
    }
    return kind(**options | inner)


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
    component = locate(options["_target_"], section)
    owner: Any = getattr(component, "__self__", component)  # the class, or that of a class method
    missing = sorted(getattr(owner, "__abstractmethods__", ()))
    if missing:
        raise ValueError(
            f"{section}: {owner.__name__} has no {' and no '.join(missing)}: write it as its base class says"
        )
    # The name is checked where it is used: every loader has a word of its own for it.
    arguments = {key: value for key, value in options.items() if not (key == "name" and _loads(options))}
    arguments.pop("_target_")
    check_arguments(component, arguments, section, given_first=_loads(options))
    for part in _components_in(options):
        component_of(config, f"{section}.{part}")
    return component, options


def locate(name: Any, within: str) -> Callable[..., Any]:
    """The class or function of a dotted name. An error that its module raises is passed on.

    Raises:
        ValueError: There is no such class or function.
    """
    setting = f"{within}._target_={name!r}"
    try:
        found = get_object(str(name))
    except (ImportError, ValueError) as error:
        cause = error.__cause__ or error
        absent = isinstance(cause, ModuleNotFoundError) and f"{name}.".startswith(f"{cause.name}.")
        if not absent and not isinstance(cause, AttributeError | ValueError):
            raise cause from None  # its module is there, and raises
        raise ValueError(
            f"{setting}: there is no such class or function; if it is in a file of yours, run in its folder or put "
            f"that folder on PYTHONPATH"
        ) from error
    if not callable(found):
        raise ValueError(f"{setting} is of type {type(found).__name__}: name a class or function")
    return found


def components_within(config: DictConfig, section: str) -> list[str]:
    """The dotted names of a component's section and of the sections of all components that it is made of."""
    options = plain(config, section)
    parts = _components_in(options) if isinstance(options, dict) else []
    return [section, *(name for part in parts for name in components_within(config, f"{section}.{part}"))]


def build(config: DictConfig, section: str) -> Any:
    """Instantiate a section of the configuration with ``_target_``; None where that is null.

    ``name`` of anything that is loaded with ``from_pretrained`` is its first argument, whatever that one calls it:
    so ``target.name=…`` and ``drafter.name=…`` are the same for all.

    Args:
        config: The whole, so that references between sections resolve.

    Raises:
        ValueError: A value is of the wrong type, or the component refuses its arguments.
    """
    component, options = component_of(config, section)
    return None if component is None else instantiate(_named_first(options), _convert_="all")


def _components_in(options: dict[str, Any]) -> list[str]:
    """The arguments that are components themselves."""
    return [key for key, value in options.items() if isinstance(value, dict) and value.get("_target_") is not None]


def _named_first(options: dict[str, Any]) -> dict[str, Any]:
    """A component's section, and those within it, as Hydra takes it: with the ``name`` as the first argument."""
    parts = {key: _named_first(options[key]) for key in _components_in(options)}
    if not _loads(options):
        return options | parts
    return {key: value for key, value in options.items() if key != "name"} | parts | {"_args_": [options["name"]]}


def _loads(options: dict[str, Any]) -> bool:
    return options["_target_"].endswith(".from_pretrained") and "name" in options
