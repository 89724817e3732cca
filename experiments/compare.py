"""Runs side by side: ``python -m experiments.compare outputs/one outputs/another``; ``format=html`` as one page."""

from dataclasses import dataclass

from experiments.config.kinds import Folder, Format, Natural, OneOrMore, Positive, Runs, Text
from experiments.config.launch import Command
from experiments.config.words import with_folders, with_lists


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """What ``conf/compare.yaml`` holds."""

    runs: Runs
    allow_mixed: bool
    format: OneOrMore[Format]
    difference: Text | None
    width: Positive | None
    max_prompts: Natural
    out: Folder
    title: bool = True


compare = Command("compare", CompareSettings, rewrite=lambda words: with_lists(with_folders(words, "runs")))
main = compare.main

if __name__ == "__main__":
    main()
