"""One output on the terminal, token by token: ``python -m experiments.show outputs/run/… prompt=3``."""

from functools import partial

from experiments.config.launch import Command
from experiments.config.words import with_folders

show = Command("show", rewrite=partial(with_folders, name="run", several=False))
main = show.main

if __name__ == "__main__":
    main()
