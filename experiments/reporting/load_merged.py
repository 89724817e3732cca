"""Studies of load in one table, wherever they were made."""

from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.load.run import LoadRun
from experiments.load.studies import Study, check_alike, merged, remarks, terms_of, title_of
from experiments.reporting.load import LoadReport, report_load
from experiments.reporting.table import Column, Table, left
from experiments.reporting.terminal import short
from experiments.results.comparison import commit_of


def report_studies(
    studies: Sequence[Study], out: Path, *, allow_mixed: bool = False, missing: Sequence[str] = ()
) -> list[LoadRun]:
    """Print and write the tables and pictures of all runs of some studies; returns the runs as they are called there.

    Args:
        allow_mixed: Also put studies of different targets, texts, workloads or dtypes side by side, and say so.
        missing: Sentences about jobs without results, to be listed.
    """
    notes = [*check_alike(studies, allow_mixed=allow_mixed), *remarks(studies), *missing]
    terms, bootstrap = terms_of(studies)
    runs = merged(studies)
    title, more = title_of(studies), [origins(studies)]
    report_load(
        runs,
        LoadReport(folder=out, terms=terms, bootstrap=bootstrap, title=title, notes=notes, more=more, timelines=False),
    )
    return runs


def origins(studies: Sequence[Study]) -> Table:
    """A row per study: where and with what it was made."""
    columns: list[tuple[Column | str, Callable[[Study], str]]] = [
        (left("folder", fold=True), lambda each: short(each.folder)),
        (left("machine"), lambda each: each.machine),
        (left("device", fold=True), lambda each: each.fact("device")),
        (left("dtype"), lambda each: each.fact("dtype")),
        (left("commit", fold=True), lambda each: commit_of(each.manifest)),
        ("runs", lambda each: str(len(each.runs))),
    ]
    return Table.of(studies, columns, title="Where runs were made")
