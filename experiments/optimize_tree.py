"""The best tree shape for a drafter: ``python -m experiments.optimize_tree outputs/traced``.

Reads the rounds of a run that drafted a wide tree (``experiments.run trace=true 'drafter.shape=[5,3,3,2]'``). It
estimates how often the child of each rank is accepted at each depth, measures how long rounds with trees of several
sizes take here, and finds for every number of nodes the tree that emits most tokens per round. The one with the most
tokens per second is printed and written in a form that a run takes, and measured beside the old one.
"""

from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from experiments.config.launch import launch, rewrite_command_line
from experiments.config.sections import settings_of
from experiments.config.settings import OPTIMIZE_TREE
from experiments.config.short_form import with_folders

if TYPE_CHECKING:
    from experiments.reporting.best_tree import Optimized


def optimize_tree(config: DictConfig) -> "list[Optimized]":
    """Find the best tree at every temperature of the configuration's traces; print and write what was found.

    Raises:
        ValueError: There is no such trace, or one from which no rates follow; or costs are of another machine.
    """
    if OmegaConf.is_missing(config, "trace"):
        raise ValueError("trace has no value: give experiments.optimize_tree FOLDER, of a run made with trace=true")
    settings_of(config, OPTIMIZE_TREE)
    from experiments.commands.optimize_tree import optimize

    return optimize(config)


def main() -> None:
    """Optimize; ``experiments.optimize_tree FOLDER…`` is short for ``trace=[FOLDER,…]``."""
    rewrite_command_line(lambda words: with_folders(words, "trace", several=True))
    launch(optimize_tree, "optimize_tree")


if __name__ == "__main__":
    main()
