"""Overrides of the command line that Hydra does not take, in words that it does."""

import re
from collections.abc import Sequence

from experiments.config.sections import CONF

_OVERRIDE = re.compile(r"(?P<group>[a-z_]+)=(?P<values>[\w,]+)")


def without_nulls(arguments: Sequence[str]) -> list[str]:
    """Returns a command line with ``none`` for ``null`` where it chooses a group: ``drafter=null`` decodes plainly.

    Raises:
        ValueError: The group has no option ``none``, because a run cannot do without it.
    """
    return [_without_null(argument) for argument in arguments]


def _without_null(argument: str) -> str:
    found = _OVERRIDE.fullmatch(argument)
    if found is None or "null" not in found["values"].split(","):
        return argument
    group = CONF / found["group"]
    options = sorted(path.stem for path in group.glob("*.yaml"))
    if not options or found["group"] == "experiment":
        return argument  # a single value, or a group that may be empty
    if "none" not in options:
        raise ValueError(f"{argument}: a run needs a {found['group']}, choose among {', '.join(options)}")
    return f"{found['group']}={','.join('none' if value == 'null' else value for value in found['values'].split(','))}"
