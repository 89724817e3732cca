"""One table and two plots across runs: ``python -m experiments.compare 'runs=[outputs/one,outputs/another]'``.

``runs`` takes folders of runs, folders of sweeps (all their jobs), and patterns such as ``outputs/sweep/*``; a single
one needs no brackets. ``format=md,csv,latex,html,parquet`` says how the table is written.
"""

from experiments.config.launch import Command
from experiments.config.words import with_lists

compare = Command("compare", rewrite=with_lists)
main = compare.main

if __name__ == "__main__":
    main()
