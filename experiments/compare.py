"""One table and two plots across runs: ``python -m experiments.compare 'runs=[outputs/one,outputs/another]'``."""

from experiments.config.launch import Command
from experiments.config.words import with_lists

compare = Command("compare", rewrite=with_lists)
main = compare.main

if __name__ == "__main__":
    main()
