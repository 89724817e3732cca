"""Shell completion: the line that is typed so far, made such that Hydra can complete it.

The shell asks a command with ``-sc query=bash`` and has the line in ``COMP_LINE``. Hydra completes overrides along the
package's configuration. It knows nothing of flags on that line, so ``--config-dir`` is passed on here.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from experiments.config.words import FLAGS_OF_MULTIRUN, bare_words, split

_LINE = "COMP_LINE"
_FOLDER = ("--config-dir", "-cd")
_NAMES = ("--config-name", "-cn")


def completing(arguments: Sequence[str]) -> bool:
    """Is this call a shell's question about a line that is not finished?"""
    asked = {"--shell-completion", "-sc"} & set(arguments) and any(word.startswith("query=") for word in arguments)
    return bool(asked) and _LINE in os.environ


def pass_flags_on(arguments: Sequence[str]) -> list[str]:
    """The call's command line with the flags of the typed line. Leaves a line of overrides alone in ``COMP_LINE``."""
    line, flags = completable(os.environ[_LINE])
    os.environ[_LINE] = line
    return [*arguments, *flags]


def completable(line: str) -> tuple[str, list[str]]:
    """What Hydra can complete of a line, and the flags that say which configuration to look at.

    Args:
        line: The program's name and what follows so far. The last word is being typed, unless a space ends the line.
    """
    program, *words = line.split() or [""]
    typed = "" if line.endswith(" ") or not words else words[-1]
    before = words[:-1] if typed else words
    overrides, flags = split(before)
    bare = {before[position] for position in bare_words(before)}
    kept = [word for word in overrides if word not in bare]
    if typed.startswith("-") or (before and before[-1] in (*_FOLDER, *_NAMES)):
        typed = "-"  # a flag or its value: no override begins like this, so the shell offers files
    passed: list[str] = []
    for flag, value in itertools.pairwise(flags):
        if (flag in _FOLDER and Path(value).is_dir()) or flag in _NAMES:
            passed += [flag, value]
    multirun = [flag for flag in flags if flag in FLAGS_OF_MULTIRUN]
    return " ".join([program, *multirun, *kept, typed]), passed
