"""Bare folders on the command line: ``experiments.report FOLDER`` is short for ``runs=[FOLDER]``."""

from collections.abc import Sequence
from pathlib import Path

_TAKE_A_WORD = ("--config-path", "--config-name", "--config-dir", "--package", "--cfg", "--info", "-cp", "-cn", "-cd",
                "-p", "-c", "-i")  # fmt: skip
"""Hydra's flags that are followed by a word which is no override."""


def with_folders(words: Sequence[str], name: str, *, several: bool) -> list[str]:
    """The words of a command line, with bare folders turned into an override.

    Args:
        words: As they were typed.
        name: The setting that takes the folders.
        several: It takes a list of them.

    Raises:
        ValueError: There are several folders, and the setting takes one.
    """
    folders, others = [], []
    for before, word in zip(["", *words], words, strict=False):
        flag = word.startswith("-") or before in _TAKE_A_WORD
        (others if flag or ("=" in word and not Path(word).is_dir()) else folders).append(word)
    if not folders:
        return others
    if not several and len(folders) > 1:
        raise ValueError(f"give one folder, not {len(folders)}: {' '.join(folders)}")
    quoted = [_quoted(folder) for folder in folders]
    return [f"{name}=[{','.join(quoted)}]" if several else f"{name}={quoted[0]}", *others]


def _quoted(text: str) -> str:
    """A text as Hydra's grammar reads it, whatever characters it has."""
    return "'" + text.rstrip("\\").replace("'", "\\'") + "'"
