"""Commands and options that this release no longer has, and what replaces each: the sentences of ``removed.toml``."""

import tomllib
from pathlib import Path

SENTENCES: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""The tables ``commands``, by name, and ``options``, by a command and a setting, or a setting with its value."""


def option(name: str, word: str) -> str | None:
    """What replaces the setting that a word of a command's line sets; None for any other word."""
    word, options = word.lstrip("+~"), SENTENCES["options"]
    return options.get(f"{name} {word}") or options.get(f"{name} {word.partition('=')[0]}")


def refuse(words: list[str]) -> None:
    """End ``python -m experiments.NAME`` with a sentence if there is no such command any more."""
    name = words[2].removeprefix("experiments.") if words[1:2] == ["-m"] and len(words) > 2 else ""
    if words[2:3] == [f"experiments.{name}"] and name in SENTENCES["commands"]:
        raise SystemExit(f"error: there is no command {name} any more: {SENTENCES['commands'][name]}")
