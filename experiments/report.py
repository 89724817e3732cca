"""Runs as one HTML file: ``python -m experiments.report outputs/run/… out=report.html``.

The file needs no server and no network. It has the verdict on every method, figures that can be sorted and filtered by
category, what made them, pictures, and every output token by token, with the draft trees of runs made with
``trace=true``.
"""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from experiments.config.launch import launch, rewrite_command_line
from experiments.config.sections import check_early, plain
from experiments.config.settings import REPORT
from experiments.config.short_form import with_folders


def report(config: DictConfig) -> Path:
    """Write the report on the configuration's runs, and return its path.

    Raises:
        ValueError: There is no such run, or ``out`` is no HTML file.
    """
    if OmegaConf.is_missing(config, "runs"):
        raise ValueError("runs has no value: give experiments.report FOLDER…, folders of runs or of sweeps")
    check_early(config, REPORT)
    path = Path(config.out)
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise ValueError(f"out={config.out!r}: give the name of a file that ends in .html")
    from experiments.reporting import terminal
    from experiments.reporting.report.page import outputs_to_show, tokens_of, write_page
    from experiments.results.runs import find_folders, load_run
    from experiments.session.token_texts import texts_of_run

    given = plain(config, "runs")
    listed = [str(folder) for folder in given] if isinstance(given, list) else [str(given)]
    runs = [load_run(folder) for folder in find_folders(listed)]
    if not runs:
        raise ValueError("runs is empty: give experiments.report FOLDER…, folders of runs or of sweeps")
    outputs, notes = outputs_to_show(runs, config.max_prompts)
    texts = [texts_of_run(run.folder, run.manifest, tokens_of(own)) for run, own in zip(runs, outputs, strict=True)]
    write_page(runs, outputs, texts, path, notes=notes)
    console = terminal.console()
    terminal.list_written(console, [path])
    terminal.say(console, f"{path.stat().st_size / 1000:,.0f} kB: open it in a browser", *notes)
    return path


def main() -> None:
    """Report on the runs that the command line names; ``experiments.report FOLDER`` is short for ``runs=[FOLDER]``."""
    rewrite_command_line(lambda words: with_folders(words, "runs", several=True))
    launch(report, "report")


if __name__ == "__main__":
    main()
