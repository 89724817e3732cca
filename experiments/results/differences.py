"""Paired differences of a comparison: mean acceptance lengths of two methods on the same prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from experiments.results.comparison import DRAFTER, Entry, axes_of, settings_of
from experiments.results.rows import ALL, Row, ends
from experiments.results.statistics import Bootstrap
from experiments.results.timing import lead

METHOD = "method and settings"
"""Stands for the compared setting where two rows differ in more than one."""


def paired_differences(entries: Sequence[Entry], setting: str | None = None) -> tuple[str, list[Row]]:
    """Return what is compared, and its differences from its first value, for all prompts and by category.

    A row has the other settings in which the runs differ, then ``category`` (``all`` for all prompts), ``reference``
    and ``compared``, either's mean acceptance length (``length``, ``reference_length``) on the
    ``prompts`` that both have finished, the paired ``difference``, and the ``prompts_needed`` for the wanted width.

    Two entries are compared where they share the prompts and all settings but this one; of two drafters, also where
    only one has a setting, such as a shape. The only two entries at a temperature are compared whatever they differ in.

    Args:
        setting: The setting whose values are compared; None for the drafter, or else the setting with most values.

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
    reference = named[0][setting]
    found = [
        difference
        for own, given in enumerate(named)
        for other, before in enumerate(named)
        if before[setting] == reference != given[setting] and _alike(before, given, setting)
        for difference in _differences(
            entries[other],
            entries[own],
            (reference, given[setting]),
            {name: given[name] for name in axes if name != setting},
        )
    ]
    if found:
        return setting, found
    temperatures = sorted({entry.row["temperature"] for entry in entries})
    pairs = [[entry for entry in entries if entry.row["temperature"] == t] for t in temperatures]
    return METHOD, [
        difference
        for first, second in (pair for pair in pairs if len(pair) == 2)
        for difference in _differences(first, second, (first.name, second.name), {})
    ]


def _alike(first: Mapping[str, str], second: Mapping[str, str], setting: str) -> bool:
    return all(
        first[name] == second[name]
        or (setting == DRAFTER and name.startswith("drafter.") and "null" in (first[name], second[name]))
        for name in first
        if name != setting
    )


def _differences(first: Entry, second: Entry, values: tuple[str, str], settings: dict[str, str]) -> list[Row]:
    """The second entry less the first, for all prompts and by category; none where the prompts are not the same."""
    outputs = [own for entry in (second, first) if (own := entry.run.of(entry.row)) is not None]
    if len(outputs) < 2 or first.run.manifest["prompts_hash"] != second.run.manifest["prompts_hash"]:
        return []
    bootstrap = replace(Bootstrap(**second.run.manifest["config"]["bootstrap"]), width=second.row["width"])
    rows = []
    for category in (ALL, *(part["category"] for part in second.run.parts_of(second.row))):
        own = [frame if category == ALL else frame[frame.category == category] for frame in outputs]
        found = lead("mean_acceptance_length", ({}, own[0], None), ({}, own[1], None), bootstrap)
        if found is not None and found.interval is not None:  # one prompt says nothing of its category
            row = {"category": category, "reference": values[0], "compared": values[1], "length": found.first}
            row |= {"reference_length": found.second, "difference": found.difference}
            row |= {**ends("difference", found.interval), "prompts": found.prompts}
            rows.append(settings | row | {"prompts_needed": bootstrap.prompts_needed(found.interval, found.prompts)})
    return rows
