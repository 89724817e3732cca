"""Studies of load read back from their folders, and put together."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.load.run import LoadRun, load_runs
from experiments.results.comparison import commit_of, distinguishing
from experiments.results.limits import Terms
from experiments.results.origin import read_manifest
from experiments.results.statistics import Bootstrap

_BY_COLUMN = ("rates=", "arrival.rate=", "drafter=none", "+drafter@methods.", "+policy@policies.")
"""Overrides that a column says already, or the names of methods."""


@dataclass(frozen=True)
class Study:
    """What one command has measured: its folder, what made it, and its runs, each method's rates in order."""

    folder: Path
    manifest: Mapping[str, Any]
    runs: Sequence[LoadRun]

    @classmethod
    def read(cls, folder: Path) -> "Study":
        """Return the study in a folder. Raises ValueError: the folder holds none, or none of its runs has ended."""
        manifest, runs = read_manifest(folder), load_runs(folder)
        if not runs:
            raise ValueError(f"{folder} has no results: no run of that study has ended")
        place = {name: number for number, name in enumerate(manifest.get("exactness", ()))}
        return cls(folder, manifest, sorted(runs, key=lambda run: (run.rate, place.get(run.method, len(place)))))

    @property
    def machine(self) -> str:
        return str((self.manifest.get("machine") or {}).get("host") or "unknown")

    def fact(self, name: str) -> str:
        """A fact of the manifest in words."""
        return str(self.manifest.get(name, "unknown"))

    @property
    def target(self) -> str:
        return str((self.manifest.get("target") or self.manifest["config"]["target"]).get("name"))

    @property
    def is_imported(self) -> bool:
        """Whether another load generator has measured it, which knows neither our limits nor our texts."""
        return "imported" in self.manifest["config"]

    @property
    def missing(self) -> int:
        """How many runs were planned and have not ended."""
        planned = len(self.manifest["config"].get("rates") or [None]) * len(self.manifest.get("exactness") or [None])
        return 0 if self.is_imported else planned - sum(run.facts["complete"] for run in self.runs)


def is_study(folder: Path) -> bool:
    """Return whether a folder has a manifest, and it is that of a study of load."""
    return "arrival" in read_manifest(folder)["config"]


def check_alike(studies: Sequence[Study], *, allow_mixed: bool = False) -> list[str]:
    """Return in words what studies should share and do not.

    Raises:
        ValueError: They cannot stand in one table, or should not and were not mixed on purpose.
    """
    ours = [study for study in studies if not study.is_imported]
    configs = [study.manifest["config"] for study in ours]
    if len({study.fact("loop") for study in studies}) > 1 or len({str(Terms.of(config)) for config in configs}) > 1:
        what = "loop (open or closed), or in their limits (sla)"
        raise ValueError(f"the studies differ in their {what}, and a table has one of each: compare them apart")
    usually = {
        "target": [study.target for study in ours],
        "texts": [study.fact("prompts_hash") for study in ours],
        "dtype": [study.fact("dtype") for study in ours],
        "workload": [str([config.get(name) for name in ("workload", "lengths", "requests")]) for config in configs],
        "clock (real or virtual)": [study.fact("virtual") for study in ours],
    }
    mixed = [what for what, values in usually.items() if len(set(values)) > 1]
    if mixed and not allow_mixed:
        names = " and ".join(f"in their {what}" for what in mixed)
        raise ValueError(f"the studies differ {names}: allow_mixed=true compares them all the same")
    return [f"MIXED: the studies differ in their {what}" for what in mixed]


def terms_of(studies: Sequence[Study]) -> tuple[Terms, Bootstrap]:
    """Return the limits and the settings of intervals of checked studies; none and ours if all are imported."""
    config = next((study.manifest["config"] for study in studies if not study.is_imported), {})
    return Terms.of(config), Bootstrap(**config.get("bootstrap", {}))


def merged(studies: Sequence[Study]) -> list[LoadRun]:
    """Return the runs of all studies by rate; a method is also called by what its study differs in.

    That is settings and the device or, where these do not tell two runs at the same rate apart, the folder.
    """
    top = os.path.commonpath([study.folder.absolute() for study in studies])
    several = len({study.fact("device") for study in studies}) > 1
    named: list[LoadRun] = []
    for study, settings in zip(studies, distinguishing([study.manifest for study in studies]), strict=True):
        label = [text for text in settings if not text.startswith(_BY_COLUMN)] + [study.fact("device")] * several
        folder = str(study.folder.absolute().relative_to(top))
        for run in study.runs:
            facts = {**run.facts, "study": folder, "called": run.method}
            words = [text for text in label if text != f"drafter={run.method}"]  # which the name says
            named.append(replace(run, method=", ".join([run.method, *words]), facts=facts))
    often = Counter((run.method, run.rate) for run in named)
    twice = {method for (method, _), count in often.items() if count > 1}
    for number, run in enumerate(named):
        if run.method in twice:
            named[number] = replace(run, method=f"{run.method}, {run.facts['study']}")
    return sorted(named, key=lambda run: run.rate)


def title_of(studies: Sequence[Study]) -> str:
    """Return the conditions that all studies share, in words."""
    first, *others = [study.fact("title").split("; ") for study in studies]
    return "; ".join(part for part in first if all(part in other for other in others)) or "several studies"


def remarks(studies: Sequence[Study]) -> list[str]:
    """Return what a reader of the table has to know: unfinished studies, other devices, other code."""
    incomplete = "INCOMPLETE: {} runs of {} have not ended (resume=true goes on)"
    notes = [incomplete.format(study.missing, study.folder) for study in studies if study.missing]
    notes += [f"{study.folder.name} was measured by another load generator" for study in studies if study.is_imported]
    for made, values in (
        ("on different devices", {study.fact("device") for study in studies}),
        ("by different code", {f"commit {commit_of(study.manifest)}" for study in studies}),
    ):
        if len(values) > 1:
            notes.append(f"The studies were made {made} ({', '.join(sorted(values))}): compare no times across them")
    return notes
