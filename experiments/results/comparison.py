"""Comparing runs: which ones may be compared, a named row per method, temperature and run, and two-way grids."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.results.frame import Figures, Frame
from experiments.results.records import PLAIN
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap
from experiments.results.summary import MethodSummary
from experiments.results.timing import CALL, winner

_SAME: dict[str, Callable[[Run], str]] = {
    "target": lambda run: run.manifest["target"]["name"],
    "dataset": lambda run: run.manifest["prompts_hash"],
    "dtype": lambda run: run.manifest["dtype"],
    "chat template": lambda run: json.dumps(run.manifest.get("template"), sort_keys=True),
}
"""What runs must share, unless they are mixed on purpose."""
_SHOWN: dict[str, Callable[[Run], str]] = {
    **_SAME,
    "dataset": lambda run: dataset_name(run),
    "chat template": lambda run: _template_name(run),
}
_NOT_SETTINGS = ("out=", "resume=", "hydra.", "experiment=", "tracker", "trace", "progress_every", "title=")
"""Overrides that name no row: they do not change what is measured, or the columns say it already."""


class Row(NamedTuple):
    """One method at one temperature in one run, beside plain decoding of the same run.

    Its name is the method and the settings in which its run differs from the others.
    """

    name: tuple[str, ...]
    run: Run
    method: MethodSummary
    plain: MethodSummary | None


def differences(runs: Sequence[Run]) -> list[str]:
    """What should be alike in all runs and is not, as parts of a sentence."""
    found = []
    for name, value in _SAME.items():
        # Each value once, with the first run that has it.
        first = {value(run): run for run in reversed(runs)}
        if len(first) > 1:
            alike = sorted(first.values(), key=list(runs).index)
            own = _own_settings(alike) if name == "dataset" else [""] * len(alike)
            values = [f"{_SHOWN[name](run)}{more} ({run.folder.name})" for run, more in zip(alike, own, strict=True)]
            more = f" and {len(values) - 3} more" if len(values) > 3 else ""
            found.append(f"differ in their {name}: {', '.join(values[:3])}{more}")
    return found


def _own_settings(runs: Sequence[Run]) -> list[str]:
    """In words what every run has set differently from others in its dataset; empty where nothing is."""
    settings = [run.manifest["config"].get("dataset") or {} for run in runs]
    names = [name for name in settings[0] if len({str(each.get(name)) for each in settings}) > 1]
    # What the dataset's name says already is not repeated.
    names = [name for name in names if name not in ("file", "split", "seed", "count", "_target_")]
    return ["".join(f", {name}={each.get(name)}" for name in names) for each in settings]


def dataset_name(run: Run) -> str:
    """The dataset in words: a file by its name, one of the hub by its repository's, with the dataset's split."""
    dataset = run.manifest["config"]["dataset"]
    source = dataset.get("file") or dataset.get("_target_", "").rpartition(".")[2].lower()
    hub = re.match(r"hf://datasets/[^/]+/([^/]+)", source)
    name = " ".join(filter(None, [hub[1] if hub else Path(source).name, dataset.get("split")]))
    return f"{name}, {run.manifest['prompts']} prompts, seed {dataset.get('seed')}"


def _template_name(run: Run) -> str:
    """The arguments of the chat template, and its hash."""
    found = run.manifest.get("template") or {"hash": "none"}
    return ", ".join(f"{name}={value}" for name, value in sorted(found.items(), key=lambda each: each[0] == "hash"))


def title(runs: Sequence[Run]) -> str:
    """The conditions that all runs share, in words."""
    facts: list[Callable[[Run], str]] = [_SAME["target"], _SAME["dtype"], lambda run: run.manifest["device"]]
    facts += [_SHOWN["dataset"], lambda run: f"batch {run.manifest['config']['engine']['max_batch_size']}"]
    values = [{fact(run) for run in runs} for fact in facts]
    return ", ".join(text for each in values if len(each) == 1 for text in each)


def make_rows(runs: Sequence[Run]) -> list[Row]:
    """A row per method and temperature, by temperature; plain decoding only where a run has nothing else."""
    rows = []
    for run, own in zip(runs, distinguishing([run.manifest for run in runs]), strict=True):
        plain = {m.temperature: m for m in run.summary.methods if m.method == PLAIN}
        for method in [m for m in run.summary.methods if m.method != PLAIN] or plain.values():
            # Temperature has a column.
            unsaid = (f"drafter={method.method}", "sampling.temperature=")
            parts = [part for part in own if part != unsaid[0] and not part.startswith(unsaid[1])]
            rows.append(Row((method.label, *parts), run, method, plain.get(method.temperature)))
    names = [(row.name, row.method.temperature) for row in rows]
    if len(set(names)) < len(names):
        rows = [row._replace(name=(*row.name, row.run.folder.name)) for row in rows]
    return sorted(rows, key=lambda row: row.method.temperature)


def best_of(rows: Sequence[Row], figure: str) -> set[int]:
    """Return the numbers of the best rows in a figure, at most one for each temperature (``timing.winner``).

    Rules that are not exact do not compete, because giving up exactness buys speed, nor do outputs that turned out not
    to be lossless. A row is the best only where the paired interval of its lead over the next one leaves out 0.
    """
    found: set[int] = set()
    for temperature in {row.method.temperature for row in rows}:
        rivals = [n for n, row in enumerate(rows) if row.method.temperature == temperature and row.method.competes]
        best = _winner(figure, [(rows[n].method, rows[n], "") for n in rivals])
        found |= set() if best is None else {rivals[best]}
    return found


def _winner(figure: str, rivals: Sequence[tuple[Figures, Row, str]]) -> int | None:
    """The number of the best of some figures, each with its row, and its category if it is of one alone."""
    entrants = []
    for figures, row, category in rivals:
        frames = (row.run.of(row.method), row.run.of(row.method, PLAIN))
        if category:
            frames = tuple(None if each is None else _of_category(each, category) for each in frames)
        entrants.append((figures, *frames))
    settings = rivals[0][1].run.manifest["config"]["bootstrap"] if rivals else {}
    return winner(figure, entrants, Bootstrap(**settings))


def _of_category(own: Frame, category: str) -> Frame:
    """The calls of one category alone: the time of a mixed one belongs to none."""
    alone = own.groupby(CALL).category.transform("nunique") == 1
    return own[alone & (own.category == category)]


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


# ---------------------------------------------------------------- figures by two settings

DRAFTER, TEMPERATURE, CATEGORY = "drafter", "temperature", "category"
_FILLED = 0.5
"""A grid of which less than this share is known says nothing."""


class Grid(NamedTuple):
    """Figures by two settings: the names of those of the rows and the columns, and their values in order.

    ``fixed`` has the other settings in which the runs differ, with their value in this grid; ``cells`` the figures, by
    row and column (a combination that was not run has none); ``best`` the place of the largest speedup, or None where
    chance may have made it the largest.
    """

    row: str
    column: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    fixed: dict[str, str]
    cells: dict[tuple[str, str], MethodSummary]
    best: tuple[str, str] | None = None

    @property
    def conditions(self) -> str:
        """The fixed settings in words; empty if there are none."""
        return ", ".join(f"{name}={value}" for name, value in self.fixed.items())


def grids(rows: Sequence[Row], *, by_category: bool = False) -> list[Grid]:
    """The grids of a comparison; none if its runs differ in fewer than two settings, or do not fill a grid.

    The two settings with the most values are the rows and the columns. For every combination of the others there is
    a grid of its own: nothing is averaged over settings. ``by_category``
    puts the prompts' categories into the rows, those of a single prompt left out.
    """
    named = settings_of(rows)
    axes = axes_of(named)
    entries = [(settings, row.method, row, "") for settings, row in zip(named, rows, strict=True)]
    if by_category:
        entries = [
            ({**settings, CATEGORY: category}, found, row, category)
            for settings, method, row, _ in entries
            for category, found in sorted(method.by_category.items())
        ]
        # One prompt gives no interval, and says nothing of its category.
        entries = [entry for entry in entries if entry[1].mean_acceptance_length_interval is not None]
        if not axes or len({settings[CATEGORY] for settings, *_ in entries}) < 2:
            return []
        axes = [CATEGORY, *axes]
    if len(axes) < 2 or not entries:
        return []
    values = {name: _ordered([settings[name] for settings, *_ in entries]) for name in axes}
    if len({tuple(settings[name] for name in axes) for settings, *_ in entries}) < len(entries):
        return []  # the runs differ in something besides: two would share a cell
    row, column, *others = axes
    made = []
    for combination in itertools.product(*(values[name] for name in others)):
        fixed = dict(zip(others, combination, strict=True))
        own = [entry for entry in entries if fixed.items() <= entry[0].items()]
        places = [(settings[row], settings[column]) for settings, *_ in own]
        rivals = [number for number, entry in enumerate(own) if entry[2].method.competes]
        best = _winner("speedup", [own[number][1:] for number in rivals])
        cells = {place: entry[1] for place, entry in zip(places, own, strict=True)}
        best_place = None if best is None else places[rivals[best]]
        made += [Grid(row, column, values[row], values[column], fixed, cells, best_place)] if own else []
    size = len(values[row]) * len(values[column]) * len(made)
    return made if sum(len(grid.cells) for grid in made) >= _FILLED * size else []


def settings_of(rows: Sequence[Row]) -> list[dict[str, str]]:
    """For every row, the settings in which any two differ, by name."""
    runs = list({row.run.folder: row.run for row in rows}.values())
    given = distinguishing([run.manifest for run in runs])
    overrides = {
        run.folder: {name: value for name, _, value in (text.lstrip("+").partition("=") for text in own)}
        for run, own in zip(runs, given, strict=True)
    }
    names = list(dict.fromkeys(name for own in overrides.values() for name in own))
    names = [name for name in names if name not in (DRAFTER, f"sampling.{TEMPERATURE}", "method")]
    return [
        {
            DRAFTER: row.method.label,
            **{name: overrides[row.run.folder].get(name) or _value(row.run.manifest["config"], name) for name in names},
            TEMPERATURE: f"{row.method.temperature:g}",
        }
        for row in rows
    ]


def _value(config: Mapping[str, Any], name: str) -> str:
    """The value of a setting in a run that was not given it on the command line."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return "null" if value is None else str(value).replace(" ", "")


def axes_of(named: Sequence[Mapping[str, str]]) -> list[str]:
    """Settings of at least two values, the one with the most values first."""
    names = list(dict.fromkeys(name for settings in named for name in settings))
    sizes = {name: len({settings.get(name) for settings in named}) for name in names}
    return sorted((name for name in names if sizes[name] > 1), key=lambda name: -sizes[name])


def _ordered(values: Sequence[str]) -> tuple[str, ...]:
    """Each value once: numbers by size, anything else as it came."""
    distinct = list(dict.fromkeys(values))
    try:
        return tuple(sorted(distinct, key=float))
    except ValueError:
        return tuple(distinct)
