"""Runs as one HTML file: ``python -m experiments.report outputs/run/… out=report.html``."""

from functools import partial

from experiments.config.launch import Command
from experiments.config.words import with_folders

report = Command("report", rewrite=partial(with_folders, name="runs"))
main = report.main

if __name__ == "__main__":
    main()
