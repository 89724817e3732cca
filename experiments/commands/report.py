"""Finished runs as one HTML file."""

from pathlib import Path

from omegaconf import DictConfig

from experiments.config.sections import listed
from experiments.load.studies import is_study
from experiments.reporting import terminal
from experiments.reporting.report.data import tokens_of
from experiments.reporting.report.page import outputs_to_show, write_page
from experiments.results.origin import MANIFEST
from experiments.results.runs import find_folders, load_run
from experiments.session.token_texts import texts_of_run


def report(config: DictConfig) -> Path:
    """Write the report on the configuration's runs, and return its path."""
    path = Path(config.out)
    folders = find_folders(listed(config, "runs"))
    for folder in folders:
        if (folder / MANIFEST).is_file() and is_study(folder):
            raise ValueError(f"{folder} is a study of load, which experiments.compare reports: runs=[{folder}]")
    runs = [load_run(folder) for folder in folders]
    outputs, notes = outputs_to_show(runs, config.max_prompts)
    texts = [texts_of_run(run.folder, run.manifest, tokens_of(own)) for run, own in zip(runs, outputs, strict=True)]
    write_page(runs, outputs, texts, path, notes=notes)
    console = terminal.console()
    terminal.list_written(console, [path])
    terminal.say(console, f"{path.stat().st_size / 1000:,.0f} kB: open it in a browser", *notes)
    return path
