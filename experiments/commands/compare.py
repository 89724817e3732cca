"""Finished runs, or studies of load, compared in one table."""

from pathlib import Path

from omegaconf import DictConfig

from experiments.config.sections import listed
from experiments.load.imported import import_results
from experiments.load.run import LoadRun
from experiments.load.studies import Study, is_study
from experiments.reporting.comparison import report_comparison
from experiments.reporting.load import report_studies
from experiments.results.comparison import Entry
from experiments.results.runs import find_folders, load_run


def compare(config: DictConfig) -> list[Entry] | list[LoadRun]:
    """Compare the configuration's runs; print and write the table, the figures and the pictures.

    A file is the result of another load generator, of which a folder is made first.
    """
    given = map(Path, listed(config, "runs"))
    folders = find_folders(
        [str(import_results(path, Path(config.out, path.stem)) if path.is_file() else path) for path in given]
    )
    of_load = [folder for folder in folders if is_study(folder)]
    if of_load:
        others = [folder for folder in folders if folder not in of_load]
        if others:
            raise ValueError(f"{of_load[0]} is a study of load, and {others[0]} is none: compare them apart")
        return report_studies(
            [Study.read(folder) for folder in folders], Path(config.out), allow_mixed=config.allow_mixed
        )
    runs = [load_run(folder, width=config.width) for folder in folders]
    formats = [str(name) for name in listed(config, "format")]
    return report_comparison(
        runs, Path(config.out), allow_mixed=config.allow_mixed, formats=formats, difference=config.difference
    )
