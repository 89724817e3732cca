"""Configurations: where they lie, what they may hold, how a section becomes a component, and how a command starts."""

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("specdec", "drafters", "verifiers")
"""The packages of this project besides this one; others have packages of the same names."""


def stranger(packages: Iterable[str] = PACKAGES) -> str | None:
    """A sentence on the first package that Python finds elsewhere than beside this one; None if all are this project's.

    A folder of that name in the working directory, or an installed package, would be imported in its place.
    """
    ours = Path(__file__).resolve().parents[2]
    for name in packages:
        found = find_spec(name)
        where = None if found is None else _folder(found)
        if where is not None and where != ours / name:
            return (
                f"Python finds another package {name!r} before the one of specdec-research: {where}; start the command "
                f"in another folder, rename that one, or uninstall the package that brought it"
            )
    return None


def _folder(found: ModuleSpec) -> Path | None:
    places = list(found.submodule_search_locations or ()) or ([found.origin] if found.origin else [])
    return Path(places[0]).resolve() if places else None


_wrong = stranger()
if _wrong is not None:  # before anything of it is imported
    print(f"error: {_wrong}", file=sys.stderr)
    sys.exit(1)
