"""What is this drafter, and is it loaded rightly? ``python -m experiments.inspect_drafter drafter=eagle``.

Prints what the drafter is by its files, its acceptance by depth in a few texts that the target writes, beside what such
heads usually bring, and what the likeliest other ways to load it would bring: other hidden layers, another norm,
another mask token.
"""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from experiments.config.launch import launch
from experiments.config.sections import check_early
from experiments.config.settings import INSPECT_DRAFTER

if TYPE_CHECKING:
    from experiments.inspecting.search import Inspection


def inspect(config: DictConfig) -> "Inspection":
    """Inspect the configuration's drafter, print the tables and the verdict, and return what was found.

    Raises:
        ValueError: There is no drafter with a trained head, or it does not load, or does not fit the target.
    """
    check_early(config, INSPECT_DRAFTER)
    from experiments.commands.inspect_drafter import inspect_drafter

    return inspect_drafter(config)


def main() -> None:
    """Inspect a drafter."""
    launch(inspect, "inspect_drafter")


if __name__ == "__main__":
    main()
