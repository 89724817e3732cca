"""The tables and pictures of the documentation's pages of results, from runs.

Each study is a command of ``experiments`` in a process of its own, kept in ``work``; what is there is not run again.
Its table and pictures replace what stands between the study's two marks in its page. Use an idle machine: only
``heads``, ``ceiling`` and ``markov_trees`` are about lengths, which do not depend on load.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.bench.gallery import Study, copy_pictures, run
from experiments.bench.options import option, read_options, refuse
from experiments.reporting.run_tables import methods_document
from experiments.results.runs import load_run

COSTS = Path("docs/costs.md")
FELT = Path("docs/measurements.md")
RESULTS = Path("docs/results.md")
LENGTHS = "Tokens per round by drafted nodes, a panel per temperature"


@dataclass(frozen=True)
class Evidence:
    """A study and where it stands.

    Attributes:
        study: The command.
        page: The page.
        text: The file of the study's folder with what it found, in Markdown; None for the table of a run's methods.
        captions: What each picture shows, by its name in the study's folder.
    """

    study: Study
    page: Path
    text: str | None = None
    captions: Mapping[str, str] = field(default_factory=lambda: {"nodes": LENGTHS})


def _experiment(name: str, page: Path, caption: str, *, sweep: bool = False) -> Evidence:
    """Return an experiment that writes a text and a picture of its own name."""
    study = Study("experiments.run", [f"experiment={name}"], {name: name}, sweep)
    return Evidence(study, page, f"{name}.md", {name: caption})


_METHODS = {"methods": "Tokens per round and speedup of every drafter, with intervals", "nodes": LENGTHS}
STUDIES = {
    "drafters": Evidence(
        Study("experiments.run", ["experiment=drafters"], {"drafters": "methods", "drafters_nodes": "nodes"}),
        RESULTS,
        captions=_METHODS,
    ),
    **{
        name: Evidence(Study("experiments.run", [f"experiment={name}"], {name: "nodes"}), RESULTS)
        for name in ("heads", "ceiling", "markov_trees")
    },
    "calibration": Evidence(
        Study("experiments.calibrate", ["target.inflate=110m"], {"calibration": "predicted"}),
        COSTS,
        "calibration.md",
        {"predicted": "Predicted against measured seconds of every forward, and their ratios"},
    ),
    "batch_sweep": _experiment(
        "batch_sweep", FELT, "Throughput over one user's time per token, and speedup by batch size", sweep=True
    ),
    "quadrants": _experiment(
        "quadrants",
        RESULTS,
        "How many times better than plain decoding every drafter is, a panel per kind of requests",
        sweep=True,
    ),
    "ingredients": _experiment(
        "ingredients", RESULTS, "Tokens per second of every rung, and every ingredient by itself"
    ),
}


@dataclass(frozen=True)
class Options:
    """The command line."""

    only: tuple[str, ...] = option(tuple(STUDIES), "which studies", choices=tuple(STUDIES))
    work: Path = option(Path("outputs/evidence"), "folder of the runs")
    images: Path = option(Path("docs/images"), "folder of the pictures")


def block(evidence: Evidence, folder: Path) -> str:
    """Return the part of the page about a finished study: its table, and its pictures."""
    shown = evidence.study.pictures.items()
    pictures = [f"![{evidence.captions[picture]}](images/{name}.png)" for name, picture in shown]
    if evidence.text is None:
        return "\n\n".join([methods_document(load_run(folder)).rstrip(), *pictures])
    text = (folder / evidence.text).read_text(encoding="utf-8").rstrip()
    return "\n\n".join([f"`{evidence.study.asked}`: {text}", *pictures])


def placed(page: str, name: str, text: str) -> str:
    """Return a page with a new text between the two marks of a study.

    Raises:
        ValueError: The page does not have the marks.
    """
    marks = rf"(<!-- {name}:begin [^\n]*-->\n).*?(<!-- {name}:end -->)"
    found, count = re.subn(marks, lambda match: f"{match[1]}{text}\n{match[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has no marks <!-- {name}:begin … --> and <!-- {name}:end -->: put them in")
    return found


def main() -> None:
    """Run what is missing, and write the pages."""
    options = read_options(Options, __doc__)
    try:
        for name in options.only:
            evidence, folder = STUDIES[name], options.work.resolve() / name
            seconds = run(evidence.study, folder)
            text = placed(evidence.page.read_text(encoding="utf-8"), name, block(evidence, folder))
            copy_pictures(evidence.study, folder, options.images)
            evidence.page.write_text(text, encoding="utf-8")
            print(f"{name}: {evidence.page} is up to date after {seconds:.0f} s", flush=True)
    except ValueError as error:
        refuse(error)


if __name__ == "__main__":
    main()
