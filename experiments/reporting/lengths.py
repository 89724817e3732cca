"""Tokens per round of what a study varies in two ways, and nothing that depends on time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.reporting import style
from experiments.reporting.cells import EMPTY, between, number
from experiments.reporting.formats import document, publish
from experiments.reporting.run_plots import FAMILY
from experiments.reporting.run_tables import label_of, made_with
from experiments.reporting.table import Cell, Table, left
from experiments.reporting.verdicts import warning
from experiments.results.records import PLAIN
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap
from experiments.results.summary import MethodSummary
from experiments.results.timing import gain_over

Found = dict[tuple[float, str, str], tuple[Run, MethodSummary]]
"""Methods and their runs, by temperature, row and column."""


def report_lengths(
    runs: Sequence[Run], folder: Path, *, rows: str, about: str, columns: Mapping[str, str], missing: Sequence[str] = ()
) -> None:
    """Print a table, and write it with a picture of the same into a folder: ``lengths.md`` and ``lengths.png``.

    Args:
        runs: One whose labels are "column: row", or a sweep's, of which each is a column.
        columns: Parts of the names of a sweep's columns, by the overrides that make them, as Hydra writes them.

    Raises:
        ValueError: Two methods have one place.
    """
    found: Found = {}
    for run in runs:
        named = ", ".join(name for override, name in columns.items() if override in run.manifest["overrides"])
        for method in run.summary.methods:
            if method.method == PLAIN or not method.finished:
                continue
            label = label_of(method, run.manifest["config"]["labels"])
            column, _, row = (named, "", label) if named else label.rpartition(FAMILY)
            if (method.temperature, row, column) in found:
                raise ValueError(
                    f"{row!r} stands twice in the column {column!r}: name what differs in labels or columns"
                )
            found[method.temperature, row, column] = run, method
    temperatures, names, heads = (list(dict.fromkeys(each)) for each in zip(*found, strict=True))
    signed = [
        f"signed: more than {names[0]} has in the same column, on the same prompts and given the drafts",
        "starred: an interval without zero",
    ]
    table = Table.of(
        [(temperature, name) for temperature in sorted(temperatures) for name in names],
        [
            ("T", lambda at: f"{at[0]:g}"),
            (left(rows), lambda at: at[1]),
            *(
                (head, lambda at, head=head: _cell(found, (*at, head), (at[0], "" if columns else names[0], head)))
                for head in heads
            ),
        ],
        title=about,
        notes=["tokens per round / drafted nodes per round", *([] if columns else signed), *missing],
        section=lambda at: at[0],
    )
    panels = {
        f"tokens per round, T = {temperature:g}": {
            head: [
                (place, own[1].mean_acceptance_length, own[1].mean_acceptance_length_interval)
                for place, name in enumerate(names)
                if (own := found.get((temperature, name, head))) is not None
            ]
            for head in heads
        }
        for temperature in sorted(temperatures)
    }
    made, lossy = made_with(*runs), [name for run in runs for name in run.summary.not_lossless]
    publish(
        folder,
        "lengths",
        tables=[table],
        document=document(f"{made} T{'; '.join(table.notes)[1:]}.", table),
        drawn=lambda: [
            style.rows_plot(
                folder / "lengths.png",
                names,
                panels,
                about=f"{about}, with {runs[0].summary.confidence:.0%} intervals",
                subtitle=made.partition(". ")[0],
                alarm=warning(lossy),
                one_scale=True,
            )
        ],
    )


def _cell(found: Found, at: tuple[float, str, str], first: tuple[float, str, str]) -> Cell:
    """A method's tokens per round, how many more these are than those of its column's first row, and its nodes."""
    if at not in found:
        return EMPTY
    (run, own), more = found[at], []
    if at != first and first in found:
        frames = run.of(own), found[first][0].of(found[first][1])
        assert frames[0] is not None and frames[1] is not None, "runs that were read have frames"
        gain = gain_over(frames[0], frames[1], Bootstrap(**run.manifest["config"]["bootstrap"]))
        if gain is not None:
            sure = gain.interval is not None and gain.interval[0] * gain.interval[1] > 0
            more.append(f"{gain.tokens:+.2f}{'*' if sure else ''}")
    nodes = f"/ {number(own.proposed_nodes_per_round, 1)}"
    return Cell(number(own.mean_acceptance_length), [*between(own.mean_acceptance_length_interval), *more, nodes])
