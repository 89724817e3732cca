"""Acceptance of a comparison in full: by position and category with intervals, and paired differences."""

from collections.abc import Sequence
from pathlib import Path

import pandas
from rich.console import Console

from experiments.reporting import terminal
from experiments.reporting.cells import number, of_few, signed
from experiments.reporting.formats import document, write_texts
from experiments.reporting.table import Table, left
from experiments.results.comparison import Row, settings_of
from experiments.results.differences import Difference, paired_differences
from experiments.results.frame import Frame


def report_acceptance(rows: Sequence[Row], out: Path, console: Console, *, setting: str | None = None) -> list[Path]:
    """Print the differences over all prompts, and write all of them, and acceptance by position and category.

    Args:
        setting: The setting whose values are compared, as ``paired_differences`` takes it.

    Returns:
        The files that were written: ``acceptance.csv``, and ``differences.md`` and ``.csv`` where there are any.
    """
    texts = {"acceptance.csv": _csv(positions(rows))}
    name, found = paired_differences(rows, setting)
    if found:
        summary = rows[0].run.summary
        notes = [
            "tokens per round, on the prompts that both have finished",
            f"brackets: {summary.confidence:.0%} intervals, prompts drawn in pairs",
            f"prompts needed: for ±{summary.width:g}",
            *of_few(each.found.prompts for each in found),
            *_seeds(rows),
        ]
        about = f"Differences by {name}"
        terminal.show(console, differences_table([each for each in found if not each.category], about, notes))
        full = differences_table(found, about, notes)
        frame = pandas.DataFrame([_flat(each) for each in found])
        texts |= {"differences.md": document(f"{about} ({'; '.join(notes)})", full), "differences.csv": _csv(frame)}
    return write_texts(out, texts)


def differences_table(found: Sequence[Difference], title: str, notes: Sequence[str]) -> Table:
    """A row per pair of methods, and per category of prompts if there are several."""
    names = list(found[0].settings)
    categories = any(each.category for each in found)
    return Table.of(
        found,
        [
            *((left(name), lambda each, name=name: each.settings[name]) for name in names),
            *([(left("prompts of"), lambda each: each.category or "all")] if categories else []),
            (left("compared", fold=True, min_width=20), lambda each: f"{each.values[1]} - {each.values[0]}"),
            ("lengths", lambda each: f"{number(each.found.first)} - {number(each.found.second)}"),
            ("difference", lambda each: signed(each.found.difference, each.found.interval, 2)),
            ("prompts", lambda each: str(each.found.prompts)),
            ("needed", lambda each: str(each.found.prompts_needed)),
        ],
        title=title,
        notes=notes,
        section=lambda each: (each.settings, each.values),
    )


def positions(rows: Sequence[Row]) -> Frame:
    """Acceptance by position with its intervals, a row per method, its settings, category and position."""
    found = []
    for row, settings in zip(rows, settings_of(rows), strict=True):
        for category, method in [("", row.method), *sorted(row.method.by_category.items())]:
            by = method.acceptance_by_position
            for place in range(len(by.rounds)):
                values = {name: column[place] for name, column in by.items()}
                found.append({**settings, "category": category or "all", "position": place + 1, **values})
    return pandas.DataFrame(found)


def _flat(each: Difference) -> dict[str, object]:
    low, high = each.found.interval
    figures = {name: value for name, value in each.found.items() if name != "interval"}
    named = {"category": each.category or "all", "reference": each.values[0], "compared": each.values[1]}
    renamed = {"first": "length", "second": "reference_length"}
    return {
        **each.settings,
        **named,
        **{renamed.get(name, name): value for name, value in figures.items()},
        "difference_low": low,
        "difference_high": high,
    }


def _seeds(rows: Sequence[Row]) -> list[str]:
    sampled = any(row.method.temperature > 0 for row in rows)
    seeds = {(row.run.manifest.get("seeds") or {}).get("sampling") for row in rows}
    return ["the runs have different seeds: draws add to the differences"] if sampled and len(seeds) > 1 else []


def _csv(frame: Frame) -> str:
    return frame.to_csv(index=False, lineterminator="\n", float_format="%.6g")
