"""What ``_target_`` names: a class or a function, found by its dotted name."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from experiments.config.checking import did_you_mean
from specdec.arguments import kind_of

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def locate(name: Any, within: str) -> Callable[..., Any]:
    """Returns the class or function of a dotted name. An error that its module raises is passed on.

    Args:
        name: Such as ``my_package.my_module.MyDrafter``.
        within: Name of the section, for messages.

    Raises:
        ValueError: There is no such module, nothing of this name in it, or something that cannot be called.
    """
    setting = f"{within}._target_={name!r}"
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{setting}: give the dotted name of a class, such as my_module.MyClass")
    module, rest = _module(name, setting)
    found: Any = module
    for part in rest:
        if not hasattr(found, part):
            where = getattr(found, "__name__", type(found).__name__)
            public = {each: value for each, value in vars(found).items() if not each.startswith("_")}
            there = [each for each, value in public.items() if getattr(value, "__module__", "") == where] or public
            raise ValueError(f"{setting}: there is no {part!r} in {where}{did_you_mean(part, there)}")
        found = getattr(found, part)
    if isinstance(found, ModuleType):
        raise ValueError(f"{setting} is a module: name a class or function in it, such as {name}.MyClass")
    if not callable(found):
        raise ValueError(f"{setting} is {kind_of(found)}: name a class or function")
    return found


def check_complete(
    component: Callable[..., Any], options: Mapping[str, Any], within: str, *, given_first: bool
) -> None:
    """Check that a component gets all the arguments that it needs.

    Args:
        component: A class or function.
        options: Its arguments, by name.
        within: Name of the section, for messages.
        given_first: Whether the first argument comes from elsewhere.

    Raises:
        ValueError: Names an argument that has neither a value nor a default.
    """
    if "_args_" in options or options.get("_partial_"):
        return
    for number, parameter in enumerate(inspect.signature(component).parameters.values()):
        needed = parameter.kind in _NAMED and parameter.default is parameter.empty
        if needed and parameter.name not in options and not (given_first and number == 0):
            raise ValueError(
                f"{within}.{parameter.name} is missing: give {within}.{parameter.name}=… (with + before it)"
            )


def _module(name: str, setting: str) -> tuple[ModuleType, list[str]]:
    """Returns the innermost module of a dotted name, and the names that follow it."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = ".".join(parts[:count])
        try:
            return importlib.import_module(path), parts[count:]
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if path != missing and not path.startswith(f"{missing}."):
                raise  # it is there, and imports another one that is not
    raise ValueError(
        f"{setting}: there is no module {parts[0]!r}; if it is a file of yours, run in its folder or put that folder "
        f"on PYTHONPATH"
    )
