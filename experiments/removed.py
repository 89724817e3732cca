"""Commands and options that this release no longer has, and what replaces each: the sentences of ``removed.toml``."""

import tomllib
from functools import cache
from pathlib import Path


@cache
def sentences() -> dict[str, dict[str, str]]:
    """The tables ``commands``, by name, and ``options``, by a command and a setting, or a setting with its value."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def command(name: str) -> str | None:
    """What replaces a command; None for one that was never there."""
    return sentences()["commands"].get(name.replace("-", "_"))


def option(name: str, word: str) -> str | None:
    """What replaces the setting that a word of a command's line sets; None for any other word."""
    word, options = word.lstrip("+~"), sentences()["options"]
    return options.get(f"{name} {word}") or options.get(f"{name} {word.partition('=')[0]}")


def refuse(words: list[str]) -> None:
    """End ``python -m experiments.NAME`` with a sentence if there is no such command any more."""
    if words[1:2] == ["-m"] and len(words) > 2 and words[2].startswith("experiments."):
        name = words[2].removeprefix("experiments.")
        if (instead := command(name)) is not None:
            raise SystemExit(f"error: there is no command {name} any more: {instead}")
