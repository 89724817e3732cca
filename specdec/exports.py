"""Public names of a package, imported when they are first used.

They stand once, in the imports behind its ``if TYPE_CHECKING:``, which type checkers read, too.
"""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def on_first_use(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns ``__getattr__``, ``__dir__`` (PEP 562) and ``__all__`` of a package, whose ``__name__`` is given."""

    @cache
    def homes() -> dict[str, Any]:
        source = sys.modules[package].__spec__.loader.get_source(package)  # pyright: ignore
        (branch,) = (node for node in ast.parse(source).body if isinstance(node, ast.If))
        imports = [node for node in branch.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes()[name]), name)
        setattr(sys.modules[package], name, value)  # the next access finds it without asking here
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *homes()}), sorted(homes())
