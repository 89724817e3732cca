"""A trained drafter for a serving engine: ``python -m experiments.export drafter.name=FOLDER format=… out=FOLDER``.

``format=speculators`` is what vLLM serves, ``format=sglang`` what SGLang serves, and ``format=native`` is the layout of
the drafter's authors. The kind of drafter is told by its files. What was written is read back and compared before it
takes its place, and the command that serves it is printed.
"""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from experiments.config.launch import launch, rewrite_command_line
from experiments.config.sections import check_early
from experiments.config.settings import EXPORT

if TYPE_CHECKING:
    from pathlib import Path


def export(config: DictConfig) -> "list[Path]":
    """Write the configuration's drafter, and return the files.

    Raises:
        ValueError: There is no such drafter, or the format cannot say what it is.
    """
    check_early(config, EXPORT)
    from experiments.commands.export import export_drafter

    return export_drafter(config)


def without_kinds(words: list[str]) -> list[str]:
    """Returns the command line, if it does not choose a kind of drafter as the other commands want it.

    Raises:
        ValueError: It does.
    """
    for word in words:
        if word.startswith("drafter="):
            raise ValueError(f"{word}: its files tell what kind of drafter it is, give drafter.name=FOLDER alone")
    return words


def main() -> None:
    """Export a drafter."""
    rewrite_command_line(without_kinds)
    launch(export, "export")


if __name__ == "__main__":
    main()
