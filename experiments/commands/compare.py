"""Finished runs, or studies of load, compared in one table, or shown as one page."""

from collections.abc import Collection, Sequence
from pathlib import Path

from omegaconf import DictConfig

from experiments.config.sections import listed
from experiments.load.run import LoadRun
from experiments.load.studies import Study, import_results, is_study
from experiments.reporting import terminal
from experiments.reporting.comparison import report_comparison
from experiments.reporting.load import report_studies
from experiments.reporting.report.data import tokens_of
from experiments.reporting.report.page import outputs_to_show, write_page
from experiments.results.comparison import Entry
from experiments.results.runs import Run, find_folders, load_run
from experiments.results.texts import read_token_texts
from specdec import bundled
from specdec.target.spelling import token_bytes


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
        others = [folder for folder in folders if folder not in of_load]
        if others:
            raise ValueError(f"{of_load[0]} is a study of load, and {others[0]} is none: compare them apart")
        return report_studies(
            [Study.read(folder) for folder in folders], Path(config.out), allow_mixed=config.allow_mixed
        )
    runs = [load_run(folder, width=config.width) for folder in folders]
    formats, out = [str(name) for name in listed(config, "format")], Path(config.out)
    if "html" in formats:
        formats.remove("html")
        _write_page(runs, out / "report.html", config.max_prompts)
    if not formats:
        return []
    return report_comparison(runs, out, allow_mixed=config.allow_mixed, formats=formats, difference=config.difference)


def _write_page(runs: Sequence[Run], path: Path, max_prompts: int) -> None:
    """Write runs as one HTML file, with the outputs of so many prompts token by token."""
    path.parent.mkdir(parents=True, exist_ok=True)
    outputs, notes = outputs_to_show(runs, max_prompts)
    texts = [texts_of_run(run, tokens_of(own)) for run, own in zip(runs, outputs, strict=True)]
    write_page(runs, outputs, texts, path, notes=notes)
    console = terminal.console()
    terminal.list_written(console, [path])
    terminal.say(console, f"{path.stat().st_size / 1000:,.0f} kB: open it in a browser", *notes)


def texts_of_run(run: Run, tokens: Collection[int]) -> dict[int, bytes]:
    """The texts of tokens, as a run has kept them or its target's tokenizer says, if it is on this machine.

    Those that nobody can tell are left out, and are shown as their ids.
    """
    texts = read_token_texts(run.folder)
    missing = set(tokens) - texts.keys()  # all of an older run, and some of one that was killed and went on
    if not missing:
        return texts
    from transformers import AutoTokenizer  # takes seconds to import, and runs keep their texts

    name = bundled.resolve(str(run.manifest.get("target", {}).get("name", "")))
    try:
        return texts | token_bytes(missing, AutoTokenizer.from_pretrained(name, local_files_only=True))
    except (OSError, ValueError):
        return texts  # a model of another machine, or one that was given as an object
