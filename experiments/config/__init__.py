"""Configurations: where they lie, what they may hold, how a section becomes a component, and how a command starts."""

import sys
from importlib.util import find_spec
from pathlib import Path


def stranger() -> str | None:
    """A sentence on the first package that Python finds elsewhere than beside this one; None if all are this project's.

    A folder of that name in the working directory, or an installed package, would be imported in its place.
    """
    ours = Path(__file__).resolve().parents[2]
    for name in ("specdec", "drafters", "verifiers"):
        found = find_spec(name)
        places = [] if found is None else [*(found.submodule_search_locations or ()), found.origin]
        where = Path(places[0]).resolve() if places and places[0] else None
        if where is not None and where != ours / name:
            return (
                f"Python finds another package {name!r} before the one of specdec-research: {where}; start the command "
                f"in another folder, rename that one, or uninstall the package that brought it"
            )
    return None


_wrong = stranger()
if _wrong is not None:  # before anything of it is imported
    print(f"error: {_wrong}", file=sys.stderr)
    sys.exit(1)
