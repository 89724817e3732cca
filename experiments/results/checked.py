"""Which exact rules a check has confirmed or refuted: ``check_verifier`` remembers it in the project's folder.

A rule states in its class that it is exact. The rules that ship with the package are checked by the package's own
tests. Any other rule is "exact (declared)" in all results until ``python -m experiments.check`` has passed it
("exact") or not ("exact (refuted)"), and again as soon as its code or an argument changes, because a digest of both is
remembered.

The file is ``.specdec/checked.json`` at the root of the project: the nearest folder, from the working directory
upwards, that has a ``.specdec``, a ``.git`` or a ``pyproject.toml``; without any, the working directory. It can be
deleted or left out of version control: rules are then declared until they are checked again.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import specdec
from experiments.results.lossless import DECLARED, EXACT
from experiments.results.origin import json_text, replace_text

if TYPE_CHECKING:
    from specdec.interfaces import Verifier

FOLDER = ".specdec"
CHECKED = "checked.json"
REFUTED = "exact (refuted)"
"""The word for a rule that states that it is exact, and whose check says otherwise."""
_ROOT_MARKS = (FOLDER, ".git", "pyproject.toml")
_SHIPPED = "verifiers"
"""The package whose public rules are checked by the package's own tests."""
_CORE = ("specdec", "builtins", "abc", "typing")
"""Packages that a rule is built on; specdec's version stands for their source."""


def stated_exactness(rule: "Verifier") -> str:
    """The word of results for a rule: its promise, and whether an exact one is only declared, or was refuted.

    Raises:
        ValueError: The project's file is damaged.
    """
    promise = str(rule.exactness.value)
    if promise != EXACT or ships(rule):
        return promise
    known = _read(checked_file())
    found = known.get(digest(rule) or "") if known else None
    return DECLARED if found is None else EXACT if found.get("passed", True) else REFUTED


def ships(rule: "Verifier") -> bool:
    """Whether a rule is a public one of this package, which its own tests check."""
    kind, package = type(rule), sys.modules.get(_SHIPPED)
    return kind.__name__ in getattr(package, "__all__", ()) and getattr(package, kind.__name__, None) is kind


def remember(rule: "Verifier", *, passed: bool, **how: object) -> Path | None:
    """Remember whether a rule, this code with these arguments, has passed its check.

    Returns:
        The file that remembers it, and how it was checked; None where the rule's source cannot be read, so that an
        edit could not be noticed.
    """
    name = digest(rule)
    if name is None:
        return None
    path = checked_file()
    arguments = {key: repr(value) for key, value in getattr(rule, "__dict__", {}).items()}
    facts = {"rule": f"{type(rule).__module__}.{type(rule).__qualname__}", "arguments": arguments}
    facts |= {"checked": datetime.now().astimezone().isoformat(timespec="seconds"), "specdec": specdec.__version__}
    replace_text(path, json_text({"rules": {**_read(path), name: {**facts, "passed": passed, **how}}}))
    return path


def checked_file() -> Path:
    """Where the project of the working directory remembers its checks."""
    here = Path.cwd()
    marked = (each for each in (here, *here.parents) if any((each / mark).exists() for mark in _ROOT_MARKS))
    return next(marked, here) / FOLDER / CHECKED


def digest(rule: "Verifier") -> str | None:
    """A short name of a rule's code and arguments; None where its source cannot be read.

    The code is that of the modules that define its class and the bases of it, and of the project's other modules that
    those use. The framework's and installed packages' code is not read: specdec's version stands for it.
    """
    kind = type(rule)
    waiting = [sys.modules.get(each.__module__) for each in kind.__mro__]
    modules: dict[str, ModuleType] = {}
    while waiting:
        module = waiting.pop()
        if module is None or module.__name__ in modules or module.__name__.partition(".")[0] in _CORE:
            continue
        modules[module.__name__] = module
        for value in list(vars(module).values()):
            named = getattr(value, "__module__", None) or ""
            used = value if isinstance(value, ModuleType) else sys.modules.get(named)
            waiting += [used] if used is not None and _is_project(used) else []
    try:
        sources = [Path(modules[name].__file__ or "").read_text(encoding="utf-8") for name in sorted(modules)]
    except (AttributeError, OSError):
        return None  # no file, as in an interactive session
    if not sources:
        return None
    arguments = _canonical(getattr(rule, "__dict__", repr(rule)))
    parts = [specdec.__version__, f"{kind.__module__}.{kind.__qualname__}", arguments, *sources]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _is_project(module: ModuleType) -> bool:
    """Whether a module is neither Python's nor an installed package's, of this or another environment."""
    file = getattr(module, "__file__", None)
    is_python = module.__name__.partition(".")[0] in sys.stdlib_module_names
    return not is_python and file is not None and not {"site-packages", "dist-packages"}.intersection(Path(file).parts)


def _canonical(value: Any, above: tuple[int, ...] = ()) -> str:
    """A text that is equal for equal arguments, in every process."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if id(value) in above:
        return "itself"
    above, name = (*above, id(value)), f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, FunctionType | type | ModuleType):
        return f"{getattr(value, '__module__', '')}.{value.__name__}"
    if hasattr(value, "tolist"):  # tensors and arrays
        return f"{name} {getattr(value, 'dtype', '')} {value.tolist()!r}"
    if isinstance(value, list | tuple):
        return f"{name}{[_canonical(part, above) for part in value]}"
    if isinstance(value, set | frozenset):
        return f"{name}{sorted(_canonical(part, above) for part in value)}"
    parts = value if isinstance(value, Mapping) else getattr(value, "__dict__", {"": repr(value)})
    return f"{name}{sorted((_canonical(key, above), _canonical(part, above)) for key, part in parts.items())}"


def _read(path: Path) -> dict[str, Any]:
    try:
        rules = json.loads(path.read_text(encoding="utf-8"))["rules"] if path.is_file() else {}
        return {**rules}
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is damaged ({problem}): remove it, and check your rules again") from error
