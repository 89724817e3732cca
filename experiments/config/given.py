"""What the commands over finished runs are given: ``runs=…`` and ``format=…``. Light to import."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.config.sections import check_early, plain
from experiments.config.values import Check
from experiments.config.words import bare_words


def folders_of(config: DictConfig, known: dict[str, Check]) -> list[Path]:
    """The folders that ``config.runs`` stands for, after a check of all settings.

    Raises:
        ValueError: A setting is wrong, or a pattern matches nothing.
    """
    if OmegaConf.is_missing(config, "runs"):
        raise ValueError("runs has no value: give 'runs=[FOLDER,FOLDER]', folders of runs or of sweeps, or a pattern")
    check_early(config, known)
    # Here and not above, so that a typing error is answered before scipy is imported.
    from experiments.results.runs import find_folders

    return find_folders([str(folder) for folder in listed(config, "runs")])


def formats_of(config: DictConfig) -> list[str]:
    """The formats that the table is to be written in."""
    return [str(name) for name in listed(config, "format")]


def listed(config: DictConfig, name: str) -> list[Any]:
    """A setting that is one value or several, as a list."""
    given = plain(config, name)
    return given if isinstance(given, list) else [given]


def tidy(words: Sequence[str]) -> list[str]:
    """The command line's words as Hydra takes them: ``format=md,latex`` becomes ``format=[md,latex]``.

    Raises:
        ValueError: A word has no name, such as a folder without ``runs=``.
    """
    bare = [words[position] for position in bare_words(words)]
    if bare:
        raise ValueError(f"{bare[0]!r} has no name: give folders as 'runs=[{','.join(bare)}]'")
    # Hydra takes a bare comma for a sweep, which makes no sense here.
    return [re.sub(r"^(format|tasks)=([\w,]*,[\w,]*)$", r"\1=[\2]", word) for word in words]
