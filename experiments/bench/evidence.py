"""The tables and pictures of the documentation's pages of results, from runs: ``python -m experiments.bench evidence``.

Each study is a command of ``experiments`` in a process of its own, kept in ``work``; what is there is not run again.
Its table and pictures replace what stands between the study's two marks in its page. Use an idle machine: only
``heads``, ``ceiling`` and ``markov_trees`` are about lengths, which do not depend on load.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.bench.gallery import Study, run
from experiments.bench.options import option, read_options, refuse
from experiments.reporting.methods import methods_document
from experiments.results.runs import load_run

COMPARED = Path("docs/drafters-compared.md")
COSTS = Path("docs/step-costs.md")
FELT = Path("docs/what-a-user-feels.md")
SOURCES = Path("docs/where-speed-comes-from.md")
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


def _lengths(name: str) -> Evidence:
    return Evidence(
        Study("experiments.run", [f"experiment={name}"], sweep=False, pictures={name: "nodes"}), page=COMPARED
    )


STUDIES = {
    "drafters": Evidence(
        Study(
            "experiments.run",
            ["experiment=drafters"],
            sweep=False,
            pictures={"drafters": "methods", "drafters_nodes": "nodes"},
        ),
        page=COMPARED,
        captions={"methods": "Tokens per round and speedup of every drafter, with intervals", "nodes": LENGTHS},
    ),
    "heads": _lengths("heads"),
    "ceiling": _lengths("ceiling"),
    "markov_trees": _lengths("markov_trees"),
    "calibration": Evidence(
        Study("experiments.calibrate", ["target.inflate=110m"], sweep=False, pictures={"calibration": "predicted"}),
        page=COSTS,
        text="calibration.md",
        captions={"predicted": "Predicted against measured seconds of every forward, and their ratios"},
    ),
    "batch_sweep": Evidence(
        Study("experiments.run", ["experiment=batch_sweep"], sweep=True, pictures={"batch_sweep": "batch_sweep"}),
        page=FELT,
        text="batch_sweep.md",
        captions={"batch_sweep": "Throughput over one user's time per token, and speedup by batch size"},
    ),
    "quadrants": Evidence(
        Study("experiments.run", ["experiment=quadrants"], sweep=True, pictures={"quadrants": "quadrants"}),
        page=SOURCES,
        text="quadrants.md",
        captions={
            "quadrants": "How many times better than plain decoding every drafter is, a panel per kind of requests"
        },
    ),
    "ingredients": Evidence(
        Study("experiments.run", ["experiment=ingredients"], sweep=False, pictures={"ingredients": "ingredients"}),
        page=SOURCES,
        text="ingredients.md",
        captions={"ingredients": "Tokens per second of every rung, and every ingredient by itself"},
    ),
}


@dataclass(frozen=True)
class Options:
    """The command line."""

    only: tuple[str, ...] = option(tuple(STUDIES), "which studies", choices=tuple(STUDIES))
    work: Path = option(Path("outputs/evidence"), "folder of the runs")
    images: Path = option(Path("docs/images"), "folder of the pictures")


def block(evidence: Evidence, folder: Path) -> str:
    """Returns what the page says of a finished study: its table, and its pictures."""
    shown = evidence.study.pictures.items()
    pictures = [f"![{evidence.captions[picture]}](images/{name}.png)" for name, picture in shown]
    if evidence.text is None:
        return "\n\n".join([methods_document(load_run(folder)).rstrip(), *pictures])
    command = f"`{evidence.study.asked}`"
    return "\n\n".join([f"{command}: {(folder / evidence.text).read_text(encoding='utf-8').rstrip()}", *pictures])


def placed(page: str, name: str, text: str) -> str:
    """Returns a page with a new text between the two marks of a study.

    Raises:
        ValueError: The page does not have the marks.
    """
    marks = rf"(<!-- {name}:begin [^\n]*-->\n).*?(<!-- {name}:end -->)"
    found, count = re.subn(marks, lambda match: f"{match[1]}{text}\n{match[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has no marks <!-- {name}:begin … --> and <!-- {name}:end -->: put them in")
    return found


def main() -> None:
    """Run what is missing, and write the page."""
    options = read_options(Options, __doc__)
    try:
        for name in options.only:
            evidence, folder = STUDIES[name], options.work.resolve() / name
            seconds = run(evidence.study, folder)
            text = placed(evidence.page.read_text(encoding="utf-8"), name, block(evidence, folder))
            for shown, picture in evidence.study.pictures.items():
                shutil.copyfile(folder / f"{picture}.png", options.images / f"{shown}.png")
            evidence.page.write_text(text, encoding="utf-8")
            print(f"{name}: {evidence.page} is up to date after {seconds:.0f} s", flush=True)
    except ValueError as error:
        refuse(error)


if __name__ == "__main__":
    main()
