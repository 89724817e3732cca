"""Figures of several runs by two of the settings in which they differ: rows, columns, and a grid for all others."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.results.comparison import Row, distinguishing
from experiments.results.statistics import Interval
from experiments.results.summary import CategorySummary, MethodSummary

DRAFTER, TEMPERATURE, CATEGORY = "drafter", "temperature", "category"

_FILLED = 0.5
"""A grid of which less than this share is known says nothing."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a cell shows.

    Attributes:
        mean_acceptance_length: With its interval.
        speedup: With its interval.
        tokens_per_second: The method's output tokens over its time.
        exactness: What its rule promises.
    """

    mean_acceptance_length: float | None
    mean_acceptance_length_interval: Interval | None
    speedup: float | None
    speedup_interval: Interval | None
    tokens_per_second: float | None
    exactness: str | None

    @classmethod
    def of(cls, found: MethodSummary | CategorySummary, exactness: str | None) -> "Figures":
        """The figures of a method, or of a method on one category."""
        return cls(
            mean_acceptance_length=found.mean_acceptance_length,
            mean_acceptance_length_interval=found.mean_acceptance_length_interval,
            speedup=found.speedup,
            speedup_interval=found.speedup_interval,
            tokens_per_second=found.tokens_per_second,
            exactness=exactness,
        )


@dataclass(frozen=True)
class Grid:
    """Figures by two settings.

    Attributes:
        row: Name of the setting of the rows.
        column: Name of the setting of the columns.
        rows: Its values, from top to bottom.
        columns: Its values, from left to right.
        fixed: The other settings in which the runs differ, with their value in this grid.
        cells: The figures, by row and column; a combination that was not run has none.
    """

    row: str
    column: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    fixed: tuple[tuple[str, str], ...]
    cells: dict[tuple[str, str], Figures]

    @property
    def conditions(self) -> str:
        """The fixed settings in words; empty if there are none."""
        return ", ".join(f"{name}={value}" for name, value in self.fixed)


def grids(rows: Sequence[Row]) -> list[Grid]:
    """The grids of a comparison; none if its runs differ in fewer than two settings, or do not fill a grid.

    The two settings with the most values are the rows and the columns. For every combination of the others there is
    a grid of its own: nothing is averaged over settings.
    """
    named = _settings(rows)
    whole = [
        (settings, Figures.of(row.method, row.method.exactness)) for settings, row in zip(named, rows, strict=True)
    ]
    return _grids(whole, _axes(named))


def category_grids(rows: Sequence[Row]) -> list[Grid]:
    """The same with the prompts' categories as rows; none unless every category has several prompts in every run."""
    named = _settings(rows)
    axes = _axes(named)
    entries = [
        ({**settings, CATEGORY: category}, Figures.of(found, row.method.exactness))
        for settings, row in zip(named, rows, strict=True)
        for category, found in sorted(row.method.by_category.items())
    ]
    # One prompt gives no interval, and says nothing of its category.
    if not axes or not entries or any(figures.mean_acceptance_length_interval is None for _, figures in entries):
        return []
    return _grids(entries, [CATEGORY, *axes], first=CATEGORY)


def _settings(rows: Sequence[Row]) -> list[dict[str, str]]:
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


def _axes(named: Sequence[Mapping[str, str]]) -> list[str]:
    """Settings of at least two values, the one with the most values first."""
    names = list(dict.fromkeys(name for settings in named for name in settings))
    sizes = {name: len({settings.get(name) for settings in named}) for name in names}
    return sorted((name for name in names if sizes[name] > 1), key=lambda name: -sizes[name])


def _grids(entries: Sequence[tuple[dict[str, str], Figures]], axes: Sequence[str], first: str = "") -> list[Grid]:
    if len(axes) < 2:
        return []
    row, column, *others = [first, *(name for name in axes if name != first)] if first else axes
    values = {name: _ordered([settings[name] for settings, _ in entries]) for name in axes}
    places = [tuple(settings[name] for name in axes) for settings, _ in entries]
    if len(set(places)) < len(places):
        return []  # the runs differ in something besides: two would share a cell
    made = []
    for combination in itertools.product(*(values[name] for name in others)):
        fixed = dict(zip(others, combination, strict=True))
        cells = {
            (settings[row], settings[column]): figures
            for settings, figures in entries
            if all(settings[name] == value for name, value in fixed.items())
        }
        if cells:
            made.append(Grid(row, column, values[row], values[column], tuple(fixed.items()), cells))
    size = len(values[row]) * len(values[column])
    full = made and sum(len(grid.cells) for grid in made) >= _FILLED * size * len(made)
    return made if full else []


def _ordered(values: Sequence[str]) -> tuple[str, ...]:
    """Each value once: numbers by size, anything else as it came."""
    distinct = list(dict.fromkeys(values))
    try:
        return tuple(sorted(distinct, key=float))
    except ValueError:
        return tuple(distinct)
