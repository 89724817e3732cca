"""Comparing runs: which ones may be compared, a named row per method and run, grids, and paired differences."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.results.records import PLAIN
from experiments.results.rows import ALL, Row, ends
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap
from experiments.results.timing import lead, winner

_SAME: dict[str, Callable[[Run], str]] = {
    "target": lambda run: run.manifest["target"]["name"],
    "dataset": lambda run: run.manifest["prompts_hash"],
    "dtype": lambda run: run.manifest["dtype"],
    "chat template": lambda run: json.dumps(run.manifest.get("template"), sort_keys=True),
}
"""What runs must share, unless they are mixed on purpose."""
_NOT_SETTINGS = ("out=", "resume=", "hydra.", "experiment=", "tracker", "trace", "progress_every", "title=")
"""Overrides that name no row: they do not change what is measured, or the columns say it already."""


class Entry(NamedTuple):
    """A method at one temperature in a run, by the method and the settings in which its run differs from the others."""

    parts: tuple[str, ...]
    run: Run
    row: Row
    plain: Row | None

    @property
    def name(self) -> str:
        return ", ".join(self.parts)


def differences(runs: Sequence[Run]) -> list[str]:
    """What should be alike in all runs and is not, as parts of a sentence."""
    parts = []
    for name, value in _SAME.items():
        first: dict[str, Run] = {}  # each value once, with the first run that has it
        for run in runs:
            first.setdefault(value(run), run)
        if len(first) > 1:
            shown = {"dataset": dataset_name, "chat template": _template_name}.get(name, value)
            values = [f"{shown(run)} ({run.folder.name})" for run in first.values()]
            more = f" and {len(values) - 3} more" if len(values) > 3 else ""
            parts.append(f"differ in their {name}: {', '.join(values[:3])}{more}")
    return parts


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
    facts += [dataset_name, lambda run: f"batch {run.manifest['config']['engine']['max_batch_size']}"]
    values = [{fact(run) for run in runs} for fact in facts]
    return ", ".join(text for value in values if len(value) == 1 for text in value)


def entries_of(runs: Sequence[Run]) -> list[Entry]:
    """An entry per method and temperature, by temperature; plain decoding only where a run has nothing else."""
    entries = []
    for run, overrides in zip(runs, distinguishing([run.manifest for run in runs]), strict=True):
        plain = {row["temperature"]: row for row in run.rows if row["method"] == PLAIN}
        named = [text for text in overrides if not text.startswith("sampling.temperature=")]  # it has a column
        for row in [row for row in run.rows if row["method"] != PLAIN] or plain.values():
            parts = [text for text in named if text != f"drafter={row['method']}"]  # the method begins the name
            entries.append(Entry((row["label"], *parts), run, row, plain.get(row["temperature"])))
    names = [(entry.parts, entry.row["temperature"]) for entry in entries]
    if len(set(names)) < len(names):
        entries = [entry._replace(parts=(*entry.parts, entry.run.folder.name)) for entry in entries]
    return sorted(entries, key=lambda entry: entry.row["temperature"])


def best_of(entries: Sequence[Entry], figure: str) -> int | None:
    """Return the number of the best exact entry in a figure (``timing.winner``); None where chance may have made it."""
    rivals = [entry for entry in entries if entry.row["competes"]]
    entrants = [(entry.row, entry.run.of(entry.row), entry.run.of(entry.row, PLAIN)) for entry in rivals]
    settings = rivals[0].run.manifest["config"]["bootstrap"] if rivals else {}
    best = winner(figure, entrants, Bootstrap(**settings))
    return None if best is None else next(place for place, entry in enumerate(entries) if entry is rivals[best])


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
    """Rows of the frame (``cells``) by two settings: the names of those down and across, and their values in order.

    ``fixed`` has the other settings in which the runs differ, with their value in this grid; ``best`` the place of the
    largest speedup, or None where chance may have made it the largest.
    """

    down: str
    across: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    fixed: dict[str, str]
    cells: dict[tuple[str, str], Row]
    best: tuple[str, str] | None = None

    @property
    def conditions(self) -> str:
        """The fixed settings in words; empty if there are none."""
        return ", ".join(f"{name}={value}" for name, value in self.fixed.items())


def grids(entries: Sequence[Entry], *, by_category: bool = False) -> list[Grid]:
    """The grids of a comparison; none if its runs differ in fewer than two settings, or do not fill a grid.

    The two settings with the most values stand down and across; every combination of the others has its own grid.
    ``by_category`` puts the prompts' categories down, those of a single prompt left out, and marks no best.
    """
    named = list(zip(settings_of(entries), entries, strict=True))
    axes = axes_of([settings for settings, _ in named])
    if by_category:
        named = [
            ({**settings, CATEGORY: part["category"]}, entry._replace(row=part))
            for settings, entry in named
            for part in entry.run.parts_of(entry.row)
            if part["mean_acceptance_length_low"] is not None  # one prompt says nothing of its category
        ]
        axes = [CATEGORY, *axes] if len({settings[CATEGORY] for settings, _ in named}) > 1 else []
    if len(axes) < 2 or len({tuple(settings[name] for name in axes) for settings, _ in named}) < len(named):
        return []  # or the runs differ in something besides: two would share a cell
    values = {name: _ordered([settings[name] for settings, _ in named]) for name in axes}
    down, across, *others = axes
    made = []
    for combination in itertools.product(*(values[name] for name in others)):
        fixed = dict(zip(others, combination, strict=True))
        chosen = {(own[down], own[across]): entry for own, entry in named if fixed.items() <= own.items()}
        if chosen:
            best = None if by_category else best_of([*chosen.values()], "speedup")
            cells = {place: entry.row for place, entry in chosen.items()}
            best_place = None if best is None else [*chosen][best]
            made.append(Grid(down, across, values[down], values[across], fixed, cells, best_place))
    return made if len(named) >= _FILLED * len(values[down]) * len(values[across]) * len(made) else []


def settings_of(entries: Sequence[Entry]) -> list[dict[str, str]]:
    """For every entry, the settings in which any two differ, by name."""
    given = [
        {name: value for name, _, value in (text.lstrip("+").partition("=") for text in overrides)}
        for overrides in distinguishing([entry.run.manifest for entry in entries])
    ]
    names = dict.fromkeys(name for overrides in given for name in overrides)
    names = [name for name in names if name not in (DRAFTER, f"sampling.{TEMPERATURE}", "method")]
    return [
        {
            DRAFTER: entry.row["label"],
            **{name: overrides.get(name) or _value(entry.run.manifest["config"], name) for name in names},
            TEMPERATURE: f"{entry.row['temperature']:g}",
        }
        for entry, overrides in zip(entries, given, strict=True)
    ]


def _value(config: Mapping[str, Any], name: str) -> str:
    """The value of a setting in a run that was not given it on the command line."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return "null" if value is None else str(value).replace(" ", "")


def axes_of(named: Sequence[Mapping[str, str]]) -> list[str]:
    """Settings of at least two values, the one with the most values first."""
    sizes = {name: len({settings[name] for settings in named}) for name in (named[0] if named else ())}
    return sorted((name for name, size in sizes.items() if size > 1), key=lambda name: -sizes[name])


def _ordered(values: Sequence[str]) -> tuple[str, ...]:
    """Each value once: numbers by size, anything else as it came."""
    distinct = tuple(dict.fromkeys(values))
    try:
        return tuple(sorted(distinct, key=float))
    except ValueError:
        return distinct


# ---------------------------------------------------------------- paired differences

METHOD = "method and settings"
"""Stands for the compared setting where two rows differ in more than one."""


def paired_differences(entries: Sequence[Entry], setting: str | None = None) -> tuple[str, list[Row]]:
    """Return the setting whose values are compared, and paired differences of mean acceptance length from its first.

    A row has the other settings in which the runs differ, the category, what is compared, and figures of the prompts
    that both have finished. Two entries are compared where they share the prompts and all settings but this one; of
    two drafters, also where only one has a setting, such as a shape. The only two entries at a temperature are compared
    whatever they differ in. Without a setting, it is the drafter, or else the setting with most values.

    Raises:
        ValueError: The entries do not differ in the setting.
    """
    named = settings_of(entries)
    axes = axes_of(named)
    if setting is None:
        setting = DRAFTER if DRAFTER in axes else next(iter(axes), None)
    elif setting not in axes:
        raise ValueError(
            f"difference={setting!r}: the runs do not differ in it, choose among {', '.join(axes) or 'none at all'}"
        )
    if setting is None:
        return METHOD, []
    reference, rows = named[0][setting], []
    for (compared, second), (before, first) in itertools.product(zip(named, entries, strict=True), repeat=2):
        if before[setting] == reference != compared[setting] and _alike(before, compared, setting):
            others = {name: compared[name] for name in axes if name != setting}
            rows += _differences(first, second, (reference, compared[setting]), others)
    if rows:
        return setting, rows
    for temperature in sorted({entry.row["temperature"] for entry in entries}):
        first, *others = [entry for entry in entries if entry.row["temperature"] == temperature]
        if len(others) == 1:
            rows += _differences(first, others[0], (first.name, others[0].name), {})
    return METHOD, rows


def _alike(first: Mapping[str, str], second: Mapping[str, str], setting: str) -> bool:
    return all(
        first[name] == second[name]
        or (setting == DRAFTER and name.startswith("drafter.") and "null" in (first[name], second[name]))
        for name in first
        if name != setting
    )


def _differences(first: Entry, second: Entry, values: tuple[str, str], settings: dict[str, str]) -> list[Row]:
    """The second entry less the first, for all prompts and by category; none where the prompts are not the same."""
    outputs = [entry.run.of(entry.row) for entry in (second, first)]
    if first.run.manifest["prompts_hash"] != second.run.manifest["prompts_hash"]:
        return []
    bootstrap = Bootstrap(**second.run.manifest["config"]["bootstrap"])
    rows = []
    for category in (ALL, *(part["category"] for part in second.run.parts_of(second.row))):
        own = [frame if category == ALL else frame[frame.category == category] for frame in outputs]
        found = lead("mean_acceptance_length", ({}, own[0], None), ({}, own[1], None), bootstrap)
        if found is not None and found.interval is not None:  # one prompt says nothing of its category
            row = {"category": category, "reference": values[0], "compared": values[1], "length": found.first}
            row |= {"reference_length": found.second, "difference": found.difference}
            rows.append({**settings, **row, **ends("difference", found.interval), "prompts": found.prompts})
    return rows
