"""Finished runs, or studies of load, compared in one table, or shown as one page."""

from pathlib import Path

from omegaconf import DictConfig

from experiments.config.sections import listed
from experiments.load.run import LoadRun, import_results
from experiments.load.studies import Study, is_study
from experiments.reporting import terminal
from experiments.reporting.comparison import report_comparison
from experiments.reporting.load import report_studies
from experiments.reporting.report.page import outputs_to_show, write_page
from experiments.results.comparison import Entry
from experiments.results.runs import find_folders, load_run
from experiments.results.texts import read_token_texts


def compare(config: DictConfig) -> list[Entry] | list[LoadRun]:
    """Compare the configuration's runs; print and write the table, the figures and the pictures.

    A file is the result of another load generator, of which a folder is made first.
    """
    given = map(Path, listed(config, "runs"))
    folders = find_folders(
        [str(import_results(path, Path(config.out, path.stem)) if path.suffix == ".json" else path) for path in given]
    )
    of_load = [folder for folder in folders if is_study(folder)]
    if of_load:
        if others := [folder for folder in folders if folder not in of_load]:
            raise ValueError(f"{of_load[0]} is a study of load, and {others[0]} is none: compare them apart")
        studies = [Study.read(folder) for folder in folders]
        return report_studies(studies, Path(config.out), allow_mixed=config.allow_mixed)
    runs = [load_run(folder) for folder in folders]
    formats, out = [str(name) for name in listed(config, "format")], Path(config.out)
    tables, compared = [name for name in formats if name != "html"], []
    if tables:
        options = {"allow_mixed": config.allow_mixed, "difference": config.difference}
        compared = report_comparison(runs, out, formats=tables, **options)
    if "html" in formats:
        path, (outputs, notes) = out / "report.html", outputs_to_show(runs, config.max_prompts)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_page(runs, outputs, [read_token_texts(run.folder) for run in runs], path, notes=notes)
        terminal.list_written(terminal.console(), [path])
        terminal.say(terminal.console(), f"{path.stat().st_size / 1000:,.0f} kB: open it in a browser", *notes)
    return compared
