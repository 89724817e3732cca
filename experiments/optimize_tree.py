"""The best tree shape for a drafter: ``python -m experiments.optimize_tree outputs/traced``."""

from functools import partial

from experiments.config.launch import Command
from experiments.config.words import with_folders

optimize_tree = Command("optimize_tree", rewrite=partial(with_folders, name="trace"))
main = optimize_tree.main

if __name__ == "__main__":
    main()
