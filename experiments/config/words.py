"""The command line as words: what Hydra does not take is put into words that it does.

Words are overrides, flags of Hydra, and bare words such as the folder in ``experiments.compare FOLDER``.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from experiments.config.sections import CONF, TABLES

_TAKE_A_WORD = {
    *("--cfg", "-c", "--package", "-p", "--info", "-i", "--experimental-rerun", "--config-path", "-cp"),
    *("--config-dir", "-cd", "--config-name", "-cn"),
}
"""Flags of Hydra whose value is the next word."""


def overrides_first(arguments: Sequence[str]) -> list[str]:
    """The same command line with all overrides before the flags and their values.

    Hydra's parser takes overrides in one piece only: it refuses ``drafter=mine --config-dir conf verifier=mine``.
    """
    return [arguments[place] for place in sorted(range(len(arguments)), key=_flags(arguments).__contains__)]


def bare_words(arguments: Sequence[str]) -> list[int]:
    """The positions of bare words, which are neither ``name=value`` or ``~name`` nor a flag nor the value of one.

    In ``outputs/run --cfg job``, the first word is bare and ``job`` is not.
    """
    flags = _flags(arguments)
    words = enumerate(arguments)
    return [place for place, word in words if "=" not in word and not word.startswith("~") and place not in flags]


def with_folders(words: Sequence[str], name: str, *, several: bool = True) -> list[str]:
    """The words of a command line, with bare folders turned into an override: ``runs=[FOLDER]``.

    Args:
        name: The setting that takes the folders.

    Raises:
        ValueError: There are several folders, and the setting takes one.
    """
    bare = set(bare_words(words))
    folders, others = [], []
    for position, word in enumerate(words):
        (folders if position in bare or ("=" in word and Path(word).is_dir()) else others).append(word)
    if not folders:
        return others
    if not several and len(folders) > 1:
        raise ValueError(f"give one folder, not {len(folders)}: {' '.join(folders)}")
    # Quoted, as Hydra's grammar reads any text.
    quoted = ["'" + folder.rstrip("\\").replace("'", "\\'") + "'" for folder in folders]
    return [f"{name}=[{','.join(quoted)}]" if several else f"{name}={quoted[0]}", *others]


def with_lists(words: Sequence[str]) -> list[str]:
    """``format=md,latex`` as ``format=[md,latex]``: Hydra takes a bare comma for a sweep.

    Raises:
        ValueError: A word has no name, such as a folder without ``runs=``.
    """
    bare = [words[position] for position in bare_words(words)]
    if bare:
        raise ValueError(f"{bare[0]!r} has no name: give folders as 'runs=[{','.join(bare)}]'")
    return [re.sub(r"^(format|tasks)=([\w,]*,[\w,]*)$", r"\1=[\2]", word) for word in words]


def with_home(words: Sequence[str]) -> list[str]:
    """``target.name=~/models`` with the user's home, which a shell puts only at the beginning of a word."""
    home = os.path.expanduser("~")
    return [re.sub(r"(?<=[=\[,:])~(?=/)", lambda _: home, word) if "=" in word else word for word in words]


def multirun_as_chosen(arguments: Sequence[str]) -> list[str]:
    """A command line with ``-m`` where a chosen experiment sweeps by itself, as in ``experiment=context drafter=a,b``.

    Hydra learns from the file that it sweeps (``hydra.mode: MULTIRUN``) after it has refused words with several values.
    """
    flags = _flags(arguments)
    overrides = [word for place, word in enumerate(arguments) if place not in flags]
    chosen = [CONF / "experiment" / f"{word.partition('=')[2]}.yaml" for word in overrides if "experiment=" in word]
    sweeps = any(path.is_file() and OmegaConf.select(OmegaConf.load(path), "hydra.mode") for path in chosen)
    if not sweeps or {"--multirun", "-m"} & set(arguments):
        return list(arguments)
    several = any(each.is_sweep_override() for each in OverridesParser.create().parse_overrides(overrides))
    return [*arguments, "-m"] if several else list(arguments)


def without_null(argument: str) -> str:
    """A word with ``none`` for ``null`` where it chooses a group: ``drafter=null`` decodes plainly.

    Raises:
        ValueError: The group has no option ``none``, because a run cannot do without it.
    """
    found = re.fullmatch(r"([a-z_]+)=([\w,]+)", argument)
    if found is None or "null" not in found[2].split(","):
        return argument
    group, values = found[1], found[2].split(",")
    options = sorted([*TABLES.get(group, ()), *(path.stem for path in (CONF / group).glob("*.yaml"))])
    if not options or group == "experiment":
        return argument  # a single value, or a group that may be empty
    if "none" not in options:
        raise ValueError(f"{argument}: a run needs a {group}, choose among {', '.join(options)}")
    return f"{group}={','.join('none' if value == 'null' else value for value in values)}"


def completing(arguments: Sequence[str]) -> bool:
    """Whether this call is a shell's question about a line that is not finished (``COMP_LINE``)."""
    asked = {"--shell-completion", "-sc"} & set(arguments) and any(word.startswith("query=") for word in arguments)
    return bool(asked) and "COMP_LINE" in os.environ


def _flags(arguments: Sequence[str]) -> set[int]:
    """The positions of Hydra's flags and of their values."""
    return {
        place
        for place, (before, word) in enumerate(zip(["", *arguments], arguments, strict=False))
        if word.startswith("-") or (before in _TAKE_A_WORD and not (before in ("--info", "-i") and "=" in word))
    }
