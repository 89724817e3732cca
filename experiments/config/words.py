"""The command line as words: overrides, flags of Hydra, and what is neither."""

from collections.abc import Sequence

_TAKE_A_WORD = {
    *("--cfg", "-c", "--package", "-p", "--info", "-i", "--experimental-rerun"),
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
}
"""Flags of Hydra whose value is the next word."""
_MAY_TAKE_A_WORD = {"--info", "-i"}
FLAGS_OF_MULTIRUN = ("--multirun", "-m")
"""Flags that make a sweep."""


def overrides_first(arguments: Sequence[str]) -> list[str]:
    """The same command line with all overrides before the flags.

    Hydra's parser takes overrides in one piece only: it refuses ``drafter=mine --config-dir conf verifier=mine``.

    Args:
        arguments: The command line, without the program's name.
    """
    overrides, flags = split(arguments)
    return [*overrides, *flags]


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides and bare words of a command line, and its flags with their values.

    Args:
        arguments: The command line, without the program's name.
    """
    overrides: list[str] = []
    flags: list[str] = []
    for before, word in zip(["", *arguments], arguments, strict=False):
        (flags if _is_flag(word) or _is_value(before, word) else overrides).append(word)
    return overrides, flags


def bare_words(arguments: Sequence[str]) -> list[int]:
    """The positions of bare words, which are neither ``name=value`` or ``~name`` nor a flag nor the value of one.

    In ``outputs/run --cfg job``, the first word is bare and ``job`` is not.

    Args:
        arguments: The command line, without the program's name.
    """
    return [
        position
        for position, (before, word) in enumerate(zip(["", *arguments], arguments, strict=False))
        if "=" not in word and not word.startswith("~") and not _is_flag(word) and not _is_value(before, word)
    ]


def _is_flag(word: str) -> bool:
    return word.startswith("-")


def _is_value(before: str, word: str) -> bool:
    """Is a word the value of the flag before it?"""
    return before in _TAKE_A_WORD and not (before in _MAY_TAKE_A_WORD and "=" in word)
