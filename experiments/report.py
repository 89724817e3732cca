"""Runs as one HTML file: ``python -m experiments.report outputs/run/… out=report.html``.

The file needs no server and no network. It has the verdict on every method, figures that can be sorted and filtered by
category, what made them, pictures, and every output token by token, with the draft trees of runs made with
``trace=true``.
"""

from functools import partial

from experiments.config.launch import Command
from experiments.config.words import with_folders

report = Command("report", rewrite=partial(with_folders, name="runs"))
main = report.main

if __name__ == "__main__":
    main()
