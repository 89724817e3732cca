"""Paired differences of a comparison: mean acceptance lengths of two methods on the same prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from experiments.results.comparison import DRAFTER, Row, axes_of, settings_of
from experiments.results.frame import Figures
from experiments.results.statistics import Bootstrap
from experiments.results.timing import lead

METHOD = "method and settings"
"""Stands for the compared setting where two rows differ in more than one."""


class Difference(NamedTuple):
    """The mean acceptance length with one value of a setting, less that with another.

    ``settings`` has the other settings in which the runs differ; ``category`` is empty for all prompts; ``values`` are
    the reference's and the other's. ``found`` is of the prompts that both have finished: ``first`` (the other's),
    ``second`` (the reference's), ``difference``, ``interval``, ``prompts`` and ``prompts_needed`` for the wanted width.
    """

    settings: dict[str, str]
    category: str
    values: tuple[str, str]
    found: Figures


def paired_differences(rows: Sequence[Row], setting: str | None = None) -> tuple[str, list[Difference]]:
    """Return what is compared, and its differences from its first value, for all prompts and by category.

    Two rows are compared where they share the prompts and all settings but this one; of two drafters, also where only
    one has a setting, such as a shape. The only two rows at a temperature are compared whatever they differ in.

    Args:
        setting: The setting whose values are compared; None for the drafter, or else the setting with most values.

    Raises:
        ValueError: The rows do not differ in the setting.
    """
    named = settings_of(rows)
    axes = axes_of(named)
    if setting is None:
        setting = DRAFTER if DRAFTER in axes else next(iter(axes), None)
    elif setting not in axes:
        raise ValueError(
            f"difference={setting!r}: the runs do not differ in it, choose among {', '.join(axes) or 'none at all'}"
        )
    if setting is None:
        return METHOD, []
    reference = named[0][setting]
    couples = [
        (other, own)
        for own, given in enumerate(named)
        for other, before in enumerate(named)
        if before[setting] == reference != given[setting] and _alike(before, given, setting)
    ]
    found = [
        difference
        for other, own in couples
        for difference in _differences(
            rows[other],
            rows[own],
            (reference, named[own][setting]),
            {name: named[own][name] for name in axes if name != setting},
        )
    ]
    if found:
        return setting, found
    pairs = [[row for row in rows if row.method.temperature == t] for t in sorted({r.method.temperature for r in rows})]
    return METHOD, [
        difference
        for first, second in (pair for pair in pairs if len(pair) == 2)
        for difference in _differences(first, second, (", ".join(first.name), ", ".join(second.name)), {})
    ]


def _alike(first: Mapping[str, str], second: Mapping[str, str], setting: str) -> bool:
    return all(
        first[name] == second[name]
        or (setting == DRAFTER and name.startswith("drafter.") and "null" in (first[name], second[name]))
        for name in first
        if name != setting
    )


def _differences(first: Row, second: Row, values: tuple[str, str], settings: dict[str, str]) -> list[Difference]:
    """The second row less the first, for all prompts and by category; none where the prompts are not the same."""
    frames = [frame for row in (second, first) if (frame := row.run.of(row.method)) is not None]
    if len(frames) < 2 or first.run.manifest["prompts_hash"] != second.run.manifest["prompts_hash"]:
        return []
    bootstrap = replace(Bootstrap(**second.run.manifest["config"]["bootstrap"]), width=second.run.summary.width)
    made = []
    for category in ("", *sorted(second.method.by_category)):
        entrants = [(Figures(), frame[frame.category == category] if category else frame, None) for frame in frames]
        found = lead("mean_acceptance_length", entrants[0], entrants[1], bootstrap)
        if found is not None and found.interval is not None:  # one prompt says nothing of its category
            needed = bootstrap.prompts_needed(found.interval, found.prompts)
            made.append(Difference(settings, category, values, found | {"prompts_needed": needed}))
    return made
