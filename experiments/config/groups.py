"""The options of a configuration group: every file along Hydra's search path, the user's own folders included.

The search path begins with the folder of ``--config-dir``, then comes the package's ``conf``, then the folders of
``hydra.searchpath``. Nothing here imports a component, so a wrong name is answered at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.config.kinds import did_you_mean
from experiments.config.sections import CONF, check_module


def option_names(group: str, searchpath: Sequence[str] | None = None) -> list[str]:
    """The names that ``group=…`` accepts.

    Args:
        searchpath: Further folders, as in ``hydra.searchpath``; None for those of the job that runs.
    """
    with _hydra():
        loader = GlobalHydra.instance().config_loader()
        return sorted(loader.get_group_options(group, overrides=_overrides(searchpath)))


def sections(group: str, given: Any, searchpath: Sequence[str] | None = None) -> dict[str, DictConfig]:
    """Several components of one group, each as the section that describes it, by a label.

    Args:
        given: A list, or a single entry: the name of an option; ``{name: OPTION, argument: value, …}`` for an option
            with other arguments; ``{_target_: package.module.Class, argument: value, …}`` for a class that has no
            file. None for all options.
        searchpath: Further folders, as in ``hydra.searchpath``; None for those of the job that runs.

    Raises:
        ValueError: There is no such option, an option has no such argument, or an entry is neither.
    """
    names = option_names(group, searchpath)
    entries = names if given is None else given if isinstance(given, list) else [given]
    read = [dict(entry) if isinstance(entry, Mapping) else {"name": entry} for entry in entries]
    for entry, more in zip(entries, read, strict=True):
        _check_entry(group, entry, more, names)
    composed = _compose(group, sorted({more["name"] for more in read if "name" in more}), searchpath)
    found: dict[str, DictConfig] = {}
    for more in read:
        name = more.pop("name", None)
        if name is not None:
            section = _with_arguments(group, name, composed[name], more)
        else:
            section = OmegaConf.create(more)
            check_module(section, f"{group}s")
            name = str(more.pop("_target_")).rpartition(".")[2]
        found[", ".join([name, *(f"{key}={value}" for key, value in more.items())])] = section
    return found


def labelled(group: str, given: list[Any]) -> dict[str, DictConfig]:
    """Several components of one group by the ``label`` of their entries, or else as ``sections`` calls them."""
    entries = [dict(entry) if isinstance(entry, Mapping) else entry for entry in given]
    labels = [entry.pop("label", None) if isinstance(entry, dict) else None for entry in entries]
    found: dict[str, DictConfig] = {}
    for entry, label in zip(entries, labels, strict=True):
        ((name, section),) = sections(group, [entry]).items()
        if (label or name) in found:
            raise ValueError(f"{group}s: two are called {label or name!r}: give one of them another label")
        found[str(label or name)] = section
    return found


def _check_entry(group: str, entry: Any, more: Mapping[str, Any], names: Sequence[str]) -> None:
    name = more.get("name")
    is_option = name in names and "_target_" not in more
    is_class = name is None and "_target_" in more
    if is_option or is_class:
        return
    if isinstance(name, str) and "_target_" not in more:
        raise ValueError(f"there is no {group} {name!r}{did_you_mean(name, names)}")
    raise ValueError(
        f"{entry!r} is no {group}: give a name, {{name: NAME, argument: value}} or "
        f"{{_target_: package.module.Class, argument: value}}"
    )


def _compose(group: str, names: Sequence[str], searchpath: Sequence[str] | None) -> dict[str, DictConfig]:
    """Options by name, composed together because Hydra takes its time for every composition."""
    chosen = [f"+{group}@option{number}={name}" for number, name in enumerate(names)]
    with _hydra():
        composed = compose(overrides=[*chosen, *_overrides(searchpath)])
    return {name: OmegaConf.select(composed, f"option{number}") for number, name in enumerate(names)}


def _with_arguments(group: str, name: str, section: Any, more: Mapping[str, Any]) -> DictConfig:
    if not OmegaConf.is_dict(section) or "_target_" not in section:
        raise ValueError(f"{group} {name} has no _target_: name the component's class there")
    for key in more:
        if key not in list(section):  # a mapping denies keys whose value is ???
            known = [str(each) for each in section if not str(each).startswith("_")]
            raise ValueError(f"{group} {name} has no {key!r}{did_you_mean(str(key), known)}")
    OmegaConf.set_struct(section, False)
    return cast(DictConfig, OmegaConf.merge(section, more))


@contextmanager
def _hydra() -> Iterator[None]:
    """The application that runs, with its search path; outside of one, the package's own configuration."""
    if GlobalHydra.instance().is_initialized():
        yield
    else:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield


def _overrides(searchpath: Sequence[str] | None) -> list[str]:
    """The override that makes Hydra search further folders, as it composes anew and knows nothing of the job."""
    if searchpath is None:
        searchpath = HydraConfig.get().searchpath if HydraConfig.initialized() else ()
    quoted = ["'" + str(folder).replace("\\", "\\\\").replace("'", "\\'") + "'" for folder in searchpath]
    return [f"hydra.searchpath=[{','.join(quoted)}]"] if quoted else []
