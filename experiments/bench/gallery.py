"""Every picture of the documentation, from the runs that it shows (``make gallery``).

Each study is one command of ``experiments``, run in a process of its own; its pictures are copied into ``out`` and its
results are kept in ``work``. A study that is complete in ``work`` is not run again, so a second call only draws.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.options import option, read_options, refuse

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Study:
    """A command and its pictures.

    Attributes:
        module: The command, without the interpreter.
        overrides: Its arguments, apart from where it writes.
        sweep: It is a sweep, whose folder is named differently.
        pictures: Where each picture stands below the study's folder, by its name in the documentation.
    """

    module: str
    overrides: Sequence[str]
    pictures: dict[str, str]
    sweep: bool = False

    @property
    def asked(self) -> str:
        """The command as a reader types it."""
        return " ".join(["python", "-m", self.module, *self.overrides])

    def command(self, folder: Path) -> list[str]:
        """Return the command line that writes into a folder."""
        where = [f"hydra.sweep.dir={folder}"]
        if not self.sweep:
            where = [f"out={folder}", f"hydra.run.dir={folder.parent / 'hydra'}"]
        return [sys.executable, "-m", self.module, *self.overrides, *where]


_PLAIN = ["race=null", "target.inflate=null", "target.dtype=float32", "sampling.max_new_tokens=96"]
STUDIES = {
    "demo": Study(
        "experiments.demo",
        ["race=null"],
        {"demo_speedup": "speedup", "demo_acceptance": "acceptance_by_position", "demo_time": "time"},
    ),
    "bundled": Study("experiments.demo", _PLAIN, {"bundled_speedup": "speedup"}),
    "ablation": Study(
        "experiments.run",
        ["experiment=ablate_acceptance"],
        {f"ablation_{name}": name for name in ("comparison", "acceptance", "heat_map")},
        sweep=True,
    ),
    "verifiers": Study(
        "experiments.run",
        ["experiment=verifiers"],
        {"verifiers": "replay", "verifiers_reach": "reach/model_drafter.shape_3_2_1_1_iid_T1"},
        sweep=True,
    ),
}


@dataclass(frozen=True)
class Options:
    """The command line."""

    only: tuple[str, ...] = option(tuple(STUDIES), "which studies", choices=tuple(STUDIES))
    work: Path = option(Path("outputs/gallery"), "folder of the runs")
    out: Path = option(Path("docs/images"), "folder of the pictures")
    format: str = option("png", "which of the two files of each picture", choices=("png", "svg"))


def run(study: Study, folder: Path) -> float:
    """Run a study unless its pictures are there; return the seconds that it took.

    Raises:
        ValueError: The command failed, or left a picture out.
    """
    begin = time.perf_counter()
    if not all((folder / f"{picture}.png").exists() for picture in study.pictures.values()):
        shutil.rmtree(folder, ignore_errors=True)
        command = study.command(folder)
        print(" ".join(["python", *command[1:]]), flush=True)
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode:
            raise ValueError(f"{study.module} ended with exit code {done.returncode}: see above")
    missing = [picture for picture in study.pictures.values() if not (folder / f"{picture}.png").exists()]
    if missing:
        raise ValueError(f"{study.module} left no {missing[0]}.png in {folder}")
    return time.perf_counter() - begin


def copy_pictures(study: Study, folder: Path, out: Path, kind: str = "png") -> None:
    """Copy a study's pictures from its folder into the documentation's."""
    out.mkdir(parents=True, exist_ok=True)
    for shown, picture in study.pictures.items():
        shutil.copyfile(folder / f"{picture}.{kind}", out / f"{shown}.{kind}")


def main() -> None:
    """Make the gallery."""
    options = read_options(Options, __doc__)
    try:
        for name in options.only:
            study, folder = STUDIES[name], options.work.resolve() / name
            seconds = run(study, folder)
            copy_pictures(study, folder, options.out, options.format)
            print(f"{name}: {len(study.pictures)} pictures in {options.out} after {seconds:.0f} s", flush=True)
    except ValueError as error:
        refuse(error)


if __name__ == "__main__":
    main()
