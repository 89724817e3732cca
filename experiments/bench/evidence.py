"""The tables and pictures of the documentation, from runs (``make gallery`` makes those that are pictures alone).

Each study is a command of ``experiments`` in a process of its own, kept in ``work``; what is complete there is not run
again. Its pictures are copied into ``images``; its table replaces what stands between the study's two marks, in README
and in every page of the documentation that has them. Use an idle machine: only ``heads``, ``ceiling``,
``markov_trees``, ``grammars``, ``hybrid`` and what needs training are about lengths, which do not depend on load.
"""

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.options import option, read_options, refuse
from experiments.reporting.engines import engines_document
from experiments.reporting.run_tables import methods_document
from experiments.results.runs import SUMMARY, Run, load_run

ROOT = Path(__file__).parents[2]
LENGTHS = "Tokens per round by drafted nodes, a panel per temperature"


@dataclass(frozen=True)
class Study:
    """A command, its pictures, and where what it found stands.

    Attributes:
        asked: The command as a reader types it, behind ``python -m``; where it writes is added.
        pictures: Where each picture stands below the study's folder, by its name in the documentation.
        sweep: It is a sweep, whose folder is named differently.
        text: The file of the study's folder with what it found, in Markdown; or what makes it of the finished run.
        captions: Descriptions of the pictures, in their order.
    """

    asked: str
    pictures: dict[str, str]
    sweep: bool = False
    text: str | Callable[[Run], str] = methods_document
    captions: Sequence[str] = (LENGTHS,)

    def command(self, folder: Path) -> list[str]:
        """Return the command line that writes into a folder."""
        where = [f"out={folder}", f"hydra.run.dir={folder.parent / 'hydra'}"]
        return [sys.executable, "-m", *self.asked.split(), *([f"hydra.sweep.dir={folder}"] if self.sweep else where)]


def _experiment(name: str, caption: str, *, sweep: bool = False) -> Study:
    """Return an experiment that writes a text and a picture of its own name."""
    return Study(f"experiments.run experiment={name}", {name: name}, sweep, f"{name}.md", [caption])


def _lengths(asked: str, caption: str, *, sweep: bool = False) -> Study:
    """Return an experiment of tokens per round alone (``experiments.reporting.lengths``); of several, the first."""
    name = re.split(r"[\[, \]]+", asked.strip("[]"))[0]
    return Study(f"experiments.run experiment={asked}", {name: "lengths"}, sweep, "lengths.md", [caption])


GALLERY = {
    "demo": Study(
        "experiments.demo race=null time_limit=null",
        {"demo_speedup": "speedup", "demo_acceptance": "acceptance_by_position", "demo_time": "time"},
    ),
    "ablation": Study(
        "experiments.run experiment=ablate_acceptance",
        {f"ablation_{name}": name for name in ("comparison", "acceptance", "heat_map")},
        sweep=True,
    ),
    "verifiers": Study(
        "experiments.run experiment=verifiers",
        {"verifiers": "replay", "verifiers_reach": "reach/model_drafter.shape_3_2_1_1_iid_T1"},
        sweep=True,
    ),
}
"""Pictures alone."""
TRAINED = {
    "backbone": _lengths("backbone", "Tokens per round of every head on the backbone, by rule and shape"),
    "data_policy": _lengths("data_policy", "Tokens per round by what a head was trained on"),
    "losses": _lengths("losses", "Tokens per round by loss and rule"),
    "which_drafter": _lengths(
        "[which_drafter,trained_heads]",
        "Tokens per round of every drafter, by text and temperature",
        sweep=True,
    ),
}
"""These need heads that are trained before: their files in ``conf/experiment`` say how."""
BESIDE = {"engines": Study("experiments.run experiment=engines", {}, text=engines_document, captions=())}
"""These need the environments of other engines."""
STUDIES = {
    "drafters": Study(
        "experiments.run experiment=drafters",
        {"drafters": "methods"},
        captions=["Tokens per round and speedup of every drafter, with intervals"],
    ),
    **{
        name: Study(f"experiments.run experiment={name}", {name: "nodes"})
        for name in ("heads", "ceiling", "markov_trees")
    },
    "calibration": Study(
        "experiments.calibrate target.inflate=110m",
        {"calibration": "predicted"},
        text="calibration.md",
        captions=["Predicted against measured seconds of every forward, and their ratios"],
    ),
    "batch_sweep": _experiment(
        "batch_sweep", "Throughput over one user's time per token, and speedup by batch size", sweep=True
    ),
    "quadrants": _experiment(
        "quadrants",
        "How many times better than plain decoding every drafter is, a panel per kind of requests",
        sweep=True,
    ),
    "ingredients": _experiment("ingredients", "Tokens per second of every rung, and every ingredient by itself"),
    "grammars": _lengths("grammars", "Tokens per round of drafts under a grammar's mask and free", sweep=True),
    "hybrid": _lengths("hybrid", "Tokens per round on two targets, with either head", sweep=True),
    **BESIDE,
    **TRAINED,
    **GALLERY,
}


@dataclass(frozen=True)
class Options:
    """The command line."""

    only: tuple[str, ...] = option(
        tuple(name for name in STUDIES if name not in BESIDE | TRAINED | GALLERY),
        "which studies",
        choices=tuple(STUDIES),
    )
    work: Path = option(Path("outputs/evidence"), "folder of the runs")
    images: Path = option(Path("docs/images"), "folder of the pictures")
    format: str = option("png", "which of the two files of each picture", choices=("png", "svg"))


def run(study: Study, folder: Path) -> float:
    """Run a study unless its files are there; return the seconds that it took.

    Raises:
        ValueError: The command failed, or left a file out.
    """
    begin, module = time.perf_counter(), study.asked.split()[0]
    files = [f"{picture}.png" for picture in study.pictures.values()]
    files += [study.text] if isinstance(study.text, str) else [] if study.pictures else [SUMMARY]
    if not all((folder / file).exists() for file in files):
        shutil.rmtree(folder, ignore_errors=True)
        command = study.command(folder)
        print(" ".join(["python", *command[1:]]), flush=True)
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode:
            raise ValueError(f"{module} ended with exit code {done.returncode}: see above")
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        raise ValueError(f"{module} left no {missing[0]} in {folder}")
    return time.perf_counter() - begin


def block(study: Study, folder: Path) -> str:
    """Return the part of the page about a finished study: its table, and its pictures."""
    shown = zip(study.pictures, study.captions, strict=True)
    pictures = [f"![{caption}](images/{name}.png)" for name, caption in shown]
    if not isinstance(study.text, str):
        return "\n\n".join([study.text(load_run(folder)).rstrip(), *pictures])
    text = (folder / study.text).read_text(encoding="utf-8").rstrip()
    return "\n\n".join([f"`python -m {shlex.join(study.asked.split())}`: {text}", *pictures])


def pages_of(name: str) -> list[Path]:
    """Return the pages that show what a study found.

    Raises:
        ValueError: A study of which more than pictures is shown has no place.
    """
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [page for page in pages if f"<!-- {name}:begin" in page.read_text(encoding="utf-8")]
    if not found and name not in GALLERY:
        raise ValueError(f"no page has the marks <!-- {name}:begin … --> and <!-- {name}:end -->: put them in")
    return found


def placed(page: str, name: str, text: str) -> str:
    """Return a page with a new text between the two marks of a study."""
    marks = rf"(<!-- {name}:begin [^\n]*-->\n).*?(<!-- {name}:end -->)"
    found, count = re.subn(marks, lambda match: f"{match[1]}{text}\n{match[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has no marks <!-- {name}:begin … --> and <!-- {name}:end -->: put them in")
    return found


def main() -> None:
    """Run what is missing, copy the pictures, and write the pages."""
    options = read_options(Options, __doc__)
    options.images.mkdir(parents=True, exist_ok=True)
    try:
        pages = {name: pages_of(name) for name in options.only}
        # Nothing is written before all have run: every run is then of the same, unchanged commit.
        seconds = {name: run(STUDIES[name], options.work.resolve() / name) for name in options.only}
        for name in options.only:
            study, folder = STUDIES[name], options.work.resolve() / name
            for page in pages[name]:
                text = placed(page.read_text(encoding="utf-8"), name, block(study, folder))
                page.write_text(text, encoding="utf-8")
            for shown, picture in study.pictures.items():
                shutil.copyfile(folder / f"{picture}.{options.format}", options.images / f"{shown}.{options.format}")
            done = [page.relative_to(ROOT).as_posix() for page in pages[name]]
            done += [f"{len(study.pictures)} pictures in {options.images}"] if study.pictures else []
            print(f"{name}: {', '.join(done)} made after {seconds[name]:.0f} s", flush=True)
    except ValueError as error:
        refuse(error)
