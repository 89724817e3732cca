"""Hydra's configuration: where it lives, and how a section of it becomes a component."""

import inspect
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf


def _find_conf() -> Path:
    """``conf/`` at the root of a clone, ``experiments/conf`` in an installed wheel."""
    package = Path(__file__).parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train_bundled.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no configuration beside {package}: reinstall the package, or run inside a clone")


CONF = _find_conf()
"""Absolute path of the configuration folder, for ``@hydra.main(config_path=str(CONF), …)``."""

_SIMPLE: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (str,),
    NoneType: (NoneType,),
}
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", NoneType: "null"}


def build(config: DictConfig, section: str, **more: Any) -> Any:
    """Instantiate a section of the configuration with ``_target_``; None where that is null.

    ``name`` of anything that is loaded with ``from_pretrained`` is its first argument, whatever that one calls it:
    so ``target.name=…`` and ``drafter.name=…`` are the same for all.

    Args:
        config: The whole, so that references between sections resolve.
        section: Dotted name of the section.
        **more: Arguments besides those of the configuration.

    Raises:
        ValueError: A value is of the wrong type, or the component refuses its arguments.
    """
    node = OmegaConf.select(config, section)
    for key in sorted(OmegaConf.missing_keys(node)):
        raise ValueError(f"{key} has no value: give {key}=…")
    options: Any = OmegaConf.to_container(node, resolve=True)
    target = options.get("_target_")
    if target is None:
        return None
    first = [options.pop("name")] if target.endswith(".from_pretrained") and "name" in options else []
    check_arguments(get_object(target), options, section)
    return instantiate(options, *first, _convert_="all", **more)


def check_arguments(component: Any, options: dict[str, Any], section: str) -> None:
    """Refuse arguments that the component does not have, and values of a wrong type where it asks for a simple one.

    Raises:
        ValueError: Names the value's place and what it should be.
    """
    parameters = inspect.signature(component).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in options:
            if name not in parameters and not name.startswith("_"):
                raise ValueError(f"there is no {section}.{name}: choose among {', '.join(parameters)}")
    for name, parameter in parameters.items():
        annotation = parameter.annotation
        kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        if name not in options or any(kind not in _SIMPLE for kind in kinds):
            continue
        allowed = {accepted for kind in kinds for accepted in _SIMPLE[kind]}
        if type(options[name]) not in allowed:  # not isinstance: true is no number
            wanted = " or ".join(_WORDS[kind] for kind in kinds)
            raise ValueError(f"{section}.{name}={options[name]!r}: give {wanted}")
