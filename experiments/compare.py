"""One table and two plots across runs: ``python -m experiments.compare 'runs=[outputs/one,outputs/another]'``.

``runs`` takes folders of runs, folders of sweeps (all their jobs), and patterns such as ``outputs/sweep/*``; a single
one needs no brackets.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from experiments.app.cli import launch, show
from experiments.app.command_line import bare_words
from experiments.app.config import check_early, plain
from experiments.app.settings import COMPARE

if TYPE_CHECKING:
    from experiments.results.comparison import Row


def compare(config: DictConfig) -> "list[Row]":
    """Compare the configuration's runs; print and write the table, the figures and the pictures.

    Raises:
        ValueError: There is no such run, or the runs differ in what they should share.
    """
    if OmegaConf.is_missing(config, "runs"):
        raise ValueError("runs has no value: give 'runs=[FOLDER,FOLDER]', folders of runs or of sweeps, or a pattern")
    check_early(config, COMPARE)
    from experiments.reporting.comparison import report_comparison
    from experiments.results.runs import find_folders, load_run

    given = plain(config, "runs")
    listed = [str(folder) for folder in given] if isinstance(given, list) else [str(given)]
    runs = [load_run(folder) for folder in find_folders(listed)]
    return report_comparison(runs, Path(config.out), allow_mixed=config.allow_mixed)


def main() -> None:
    """Compare the runs that the command line names."""
    bare = [sys.argv[1:][position] for position in bare_words(sys.argv[1:])]
    if bare:
        show(ValueError(f"{bare[0]!r} has no name: give folders as 'runs=[{','.join(bare)}]'"))
        sys.exit(1)
    launch(compare, "compare")


if __name__ == "__main__":
    main()
