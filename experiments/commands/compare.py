"""Finished runs compared in one table."""

from pathlib import Path

from omegaconf import DictConfig

from experiments.config.sections import listed
from experiments.reporting.comparison import report_comparison
from experiments.results.comparison import Row
from experiments.results.runs import find_folders, load_run


def compare(config: DictConfig) -> list[Row]:
    """Compare the configuration's runs; print and write the table, the figures and the pictures.

    Raises:
        ValueError: There is no such run, or the runs differ in what they should share.
    """
    runs = [load_run(folder) for folder in find_folders(listed(config, "runs"))]
    formats = [str(name) for name in listed(config, "format")]
    return report_comparison(runs, Path(config.out), allow_mixed=config.allow_mixed, formats=formats)
