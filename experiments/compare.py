"""One table and two plots across runs: ``python -m experiments.compare 'runs=[outputs/one,outputs/another]'``.

``runs`` takes folders of runs, folders of sweeps (all their jobs), and patterns such as ``outputs/sweep/*``; a single
one needs no brackets. ``format=md,csv,latex,html,parquet`` says how the table is written.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from experiments.config.given import folders_of, formats_of, tidy
from experiments.config.launch import launch, rewrite_command_line
from experiments.config.settings import COMPARE

if TYPE_CHECKING:
    from experiments.results.comparison import Row


def compare(config: DictConfig) -> "list[Row]":
    """Compare the configuration's runs; print and write the table, the figures and the pictures.

    Raises:
        ValueError: There is no such run, or the runs differ in what they should share.
    """
    folders = folders_of(config, COMPARE)
    from experiments.reporting.comparison import report_comparison
    from experiments.results.runs import load_run

    runs = [load_run(folder) for folder in folders]
    return report_comparison(runs, Path(config.out), allow_mixed=config.allow_mixed, formats=formats_of(config))


def main() -> None:
    """Compare the runs that the command line names."""
    rewrite_command_line(tidy)
    launch(compare, "compare")


if __name__ == "__main__":
    main()
