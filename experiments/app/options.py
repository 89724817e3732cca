"""The options of a configuration group: every file along Hydra's search path, the user's own folders included.

The search path begins with the folder of ``--config-dir``, then comes the package's ``conf``, then the folders of
``hydra.searchpath``. Nothing here imports a component, so a wrong name is answered at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.app.config import CONF, check_module
from experiments.app.settings import did_you_mean


def option_names(group: str, searchpath: Sequence[str] | None = None) -> list[str]:
    """The names that ``group=…`` accepts.

    Args:
        group: Name of the group.
        searchpath: Further folders, as in ``hydra.searchpath``; None for those of the job that runs.
    """
    with _hydra():
        loader = GlobalHydra.instance().config_loader()
        return sorted(loader.get_group_options(group, overrides=_overrides(searchpath)))


def sections(group: str, given: Any, searchpath: Sequence[str] | None = None) -> dict[str, DictConfig]:
    """Several components of one group, each as the section that describes it, by a label.

    Args:
        group: Name of the group.
        given: A list, or a single entry: the name of an option; ``{name: OPTION, argument: value, …}`` for an option
            with other arguments; ``{_target_: package.module.Class, argument: value, …}`` for a class that has no
            file. None for all options.
        searchpath: Further folders, as in ``hydra.searchpath``; None for those of the job that runs.

    Raises:
        ValueError: There is no such option, an option has no such argument, or an entry is neither.
    """
    names = option_names(group, searchpath)
    entries = names if given is None else given if isinstance(given, list) else [given]
    found: dict[str, DictConfig] = {}
    for entry in entries:
        more = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
        target, name = more.pop("_target_", None), more.pop("name", None)
        if target is not None and name is None:
            section: Any = OmegaConf.create({"_target_": target, **more})
            check_module(section, f"{group}s")
            name = str(target).rpartition(".")[2]
        elif target is None and name in names:
            section = OmegaConf.merge(_section(group, name, more, searchpath), more)
        elif target is None and isinstance(name, str):
            raise ValueError(f"there is no {group} {name!r}{did_you_mean(name, names)}")
        else:
            raise ValueError(
                f"{entry!r} is no {group}: give a name, {{name: NAME, argument: value}} or "
                f"{{_target_: package.module.Class, argument: value}}"
            )
        found[", ".join([str(name), *(f"{key}={value}" for key, value in more.items())])] = section
    return found


def _section(group: str, name: str, more: Mapping[str, Any], searchpath: Sequence[str] | None) -> DictConfig:
    with _hydra():
        composed = compose(overrides=[f"+{group}={name}", *_overrides(searchpath)])
    section = OmegaConf.select(composed, group)
    if not OmegaConf.is_dict(section) or "_target_" not in section:
        raise ValueError(f"{group} {name} has no _target_: name the component's class there")
    for key in more:
        if key not in section:
            known = [str(each) for each in section if not str(each).startswith("_")]
            raise ValueError(f"{group} {name} has no {key!r}{did_you_mean(str(key), known)}")
    OmegaConf.set_struct(section, False)
    return section


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
