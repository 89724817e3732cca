"""The best tree shape for a drafter: ``python -m experiments.optimize_tree outputs/traced``.

Reads the rounds of a run that drafted a wide tree (``experiments.run trace=true 'drafter.shape=[5,3,3,2]'``). It
estimates how often the child of each rank is accepted at each depth, measures how long rounds with trees of several
sizes take here, and finds for every number of nodes the tree that emits most tokens per round. The one with the most
tokens per second is printed and written in a form that a run takes, and measured beside the old one.
"""

from functools import partial

from experiments.config.launch import Command
from experiments.config.words import with_folders

optimize_tree = Command("optimize_tree", rewrite=partial(with_folders, name="trace"))
main = optimize_tree.main

if __name__ == "__main__":
    main()
