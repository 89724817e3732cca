"""The tables and pictures of docs/drafters-compared.md, from runs: ``python -m benchmarks.evidence``.

Each study is a run of ``experiments.run`` in a process of its own, kept in ``work``; what is there is not run again.
Its table and pictures replace what stands between the study's two marks in the page. Use an idle machine for
``drafters``, whose speeds are published; the others are about lengths, which do not depend on load.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gallery import Study, run
from benchmarks.options import option, read_options, refuse
from experiments.reporting.methods import methods_document
from experiments.results.runs import load_run

LENGTHS = "Tokens per round by drafted nodes, a panel per temperature"
STUDIES = {
    "drafters": Study(
        "experiments.run",
        ["experiment=drafters"],
        sweep=False,
        pictures={"drafters": "methods", "drafters_nodes": "nodes"},
    ),
    "heads": Study("experiments.run", ["experiment=heads"], sweep=False, pictures={"heads": "nodes"}),
    "ceiling": Study("experiments.run", ["experiment=ceiling"], sweep=False, pictures={"ceiling": "nodes"}),
    "markov_trees": Study(
        "experiments.run", ["experiment=markov_trees"], sweep=False, pictures={"markov_trees": "nodes"}
    ),
}
CAPTIONS = {"methods": "Tokens per round and speedup of every drafter, with intervals", "nodes": LENGTHS}


@dataclass(frozen=True)
class Options:
    """The command line."""

    only: tuple[str, ...] = option(tuple(STUDIES), "which studies", choices=tuple(STUDIES))
    work: Path = option(Path("outputs/evidence"), "folder of the runs")
    images: Path = option(Path("docs/images"), "folder of the pictures")
    page: Path = option(Path("docs/drafters-compared.md"), "the page")


def block(study: Study, folder: Path) -> str:
    """Returns what the page says of a finished study: its table, and its pictures."""
    pictures = [f"![{CAPTIONS[picture]}](images/{shown}.png)" for shown, picture in study.pictures.items()]
    return "\n\n".join([methods_document(load_run(folder)).rstrip(), *pictures])


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
            study, folder = STUDIES[name], options.work.resolve() / name
            seconds = run(study, folder)
            text = placed(options.page.read_text(encoding="utf-8"), name, block(study, folder))
            for shown, picture in study.pictures.items():
                shutil.copyfile(folder / f"{picture}.png", options.images / f"{shown}.png")
            options.page.write_text(text, encoding="utf-8")
            print(f"{name}: {options.page} is up to date after {seconds:.0f} s", flush=True)
    except ValueError as error:
        refuse(error)


if __name__ == "__main__":
    main()
