"""Comparing runs: which ones may be compared, and a named row per method, temperature and run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.results.lossless import Verdict, promises_exact
from experiments.results.records import PLAIN
from experiments.results.runs import Run
from experiments.results.statistics import Interval
from experiments.results.summary import MethodSummary

_SAME: dict[str, Callable[[Run], str]] = {
    "target": lambda run: run.manifest["target"]["name"],
    "dataset": lambda run: run.manifest["prompts_hash"],
    "dtype": lambda run: run.manifest["dtype"],
}
"""What runs must share, unless they are mixed on purpose."""
_SHOWN: dict[str, Callable[[Run], str]] = {**_SAME, "dataset": lambda run: dataset_name(run)}
_NOT_SETTINGS = ("out=", "resume=", "hydra.", "experiment=", "tracker", "trace", "progress_every")
"""Overrides that name no row: they do not change what is measured, or the columns say it already."""


@dataclass(frozen=True)
class Row:
    """One method at one temperature in one run.

    Attributes:
        name: The method and the settings in which its run differs from the others.
        run: Where it was measured.
        method: Its figures.
        plain: Plain decoding's, of the same run.
    """

    name: tuple[str, ...]
    run: Run
    method: MethodSummary
    plain: MethodSummary | None


def differences(runs: Sequence[Run]) -> list[str]:
    """What should be alike in all runs and is not, as parts of a sentence."""
    found = []
    for name, value in _SAME.items():
        if len({value(run) for run in runs}) > 1:
            # Each value once, with the first run that has it.
            first = {value(run): run for run in reversed(runs)}
            alike = sorted(first.values(), key=list(runs).index)
            own = _own_settings(alike, "dataset") if name == "dataset" else [""] * len(alike)
            values = [f"{_SHOWN[name](run)}{more} ({run.folder.name})" for run, more in zip(alike, own, strict=True)]
            more = f" and {len(values) - 3} more" if len(values) > 3 else ""
            found.append(f"differ in their {name}: {', '.join(values[:3])}{more}")
    return found


def _own_settings(runs: Sequence[Run], section: str) -> list[str]:
    """Returns in words what every run has set differently from others in a section; empty where nothing is."""
    settings = [run.manifest["config"].get(section) or {} for run in runs]
    names = [name for name in settings[0] if len({str(each.get(name)) for each in settings}) > 1]
    # What the dataset's name says already is not repeated.
    names = [name for name in names if name not in ("file", "seed", "count", "_target_")]
    return ["".join(f", {name}={each.get(name)}" for name in names) for each in settings]


def dataset_name(run: Run) -> str:
    """The dataset in words."""
    dataset = run.manifest["config"]["dataset"]
    source = dataset.get("file") or dataset.get("_target_", "").rpartition(".")[2].lower()
    return f"{Path(source).name}, {run.manifest['prompts']} prompts, seed {dataset.get('seed')}"


def title(runs: Sequence[Run]) -> str:
    """The conditions that all runs share, in words."""
    shared = []
    for value in (
        _SAME["target"],
        _SAME["dtype"],
        lambda run: run.manifest["device"],
        _SHOWN["dataset"],
        lambda run: f"batch {run.manifest['config']['engine']['max_batch_size']}",
    ):
        values = {value(run) for run in runs}
        shared += values if len(values) == 1 else []
    return ", ".join(shared)


def make_rows(runs: Sequence[Run]) -> list[Row]:
    """A row per method and temperature, by temperature; plain decoding only where a run has nothing else."""
    rows = []
    for run, own in zip(runs, distinguishing([run.manifest for run in runs]), strict=True):
        plain = {m.temperature: m for m in run.summary.methods if m.method == PLAIN}
        methods = [m for m in run.summary.methods if m.method != PLAIN] or list(plain.values())
        for method in methods:
            parts = [part for part in own if part != f"drafter={method.method}"]
            # Temperature has a column, unless several of a run's share a row's name.
            parts = [part for part in parts if not part.startswith("sampling.temperature=")]
            rows.append(Row((method.label, *parts), run, method, plain.get(method.temperature)))
    names = [(row.name, row.method.temperature) for row in rows]
    if len(set(names)) < len(names):
        rows = [Row((*row.name, row.run.folder.name), row.run, row.method, row.plain) for row in rows]
    return sorted(rows, key=lambda row: row.method.temperature)


def leaders(
    rows: Sequence[Row],
    value: Callable[[MethodSummary], float | None],
    interval: Callable[[MethodSummary], Interval | None],
) -> set[int]:
    """Numbers of the rows with the largest value of their temperature, and of those that may be as good.

    A row may be as good if its interval reaches the largest value. Rules that are not exact do not compete, because
    giving up exactness buys speed, nor do outputs that turned out not to be lossless. A single competitor leads nobody.
    """
    leading: set[int] = set()
    for temperature in {row.method.temperature for row in rows}:
        rivals: dict[int, tuple[float, float]] = {}
        for number, row in enumerate(rows):
            method, found = row.method, value(row.method)
            if method.temperature == temperature and found is not None and _competes(method):
                rivals[number] = (found, (interval(method) or (found, found))[1])
        if len(rivals) > 1:
            best = max(found for found, _ in rivals.values())
            leading |= {number for number, (found, high) in rivals.items() if found == best or high >= best}
    return leading


def _competes(method: MethodSummary) -> bool:
    broken = method.lossless is not None and method.lossless.verdict is Verdict.NOT_LOSSLESS
    return promises_exact(method.exactness) and not broken


def distinguishing(manifests: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """For every run, by its manifest, the overrides that not all of them were given."""
    given = [settings(manifest.get("overrides", [])) for manifest in manifests]
    common = set.intersection(*(set(each) for each in given))
    return [[text for text in each if text not in common] for each in given]


def settings(overrides: Sequence[str]) -> list[str]:
    """The overrides that change what is measured."""
    return [text for text in overrides if not text.lstrip("+").startswith(_NOT_SETTINGS)]


def commit_of(manifest: Mapping[str, Any]) -> str:
    """The code that made a run, in short."""
    git = manifest.get("git")
    return f"{git['commit'][:10]}{' with changes' if git['dirty'] else ''}" if git else "unknown"
