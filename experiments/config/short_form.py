"""Bare folders on the command line: ``experiments.report FOLDER`` is short for ``runs=[FOLDER]``."""

from collections.abc import Sequence
from pathlib import Path

from experiments.config.words import bare_words


def with_folders(words: Sequence[str], name: str, *, several: bool) -> list[str]:
    """The words of a command line, with bare folders turned into an override.

    Args:
        words: As they were typed.
        name: The setting that takes the folders.
        several: It takes a list of them.

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
    quoted = [_quoted(folder) for folder in folders]
    return [f"{name}=[{','.join(quoted)}]" if several else f"{name}={quoted[0]}", *others]


def _quoted(text: str) -> str:
    """A text as Hydra's grammar reads it, whatever characters it has."""
    return "'" + text.rstrip("\\").replace("'", "\\'") + "'"
