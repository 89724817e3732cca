"""Acceptance lengths that others have published, beside those of our runs, and what keeps them from being compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.reporting import terminal
from experiments.reporting.cells import length, number
from experiments.reporting.formats import write_texts
from experiments.reporting.table import Table, left
from experiments.results.comparison import Row, dataset_name
from experiments.results.exchange import Published, drafted_of, exported
from experiments.results.records import Record
from experiments.results.runs import Run, records_of


class Pair(NamedTuple):
    """A published figure, and a row of ours that drafted as many tokens, with its records."""

    theirs: Published
    row: Row | None = None
    records: Sequence[Record] = ()


def report_published(rows: Sequence[Row], found: Sequence[Published], out: Path) -> None:
    """Print published figures beside a comparison's rows, and write them to ``published.md``."""
    of = {folder: records_of(folder) for folder in {row.run.folder for row in rows}}
    table, console = published_table(rows, [of[row.run.folder] for row in rows], found), terminal.console()
    terminal.show(console, table)
    terminal.list_written(console, write_texts(out, {"published.md": table.markdown()}))


def export(run: Run, format: str, out: Path) -> list[Path]:
    """Write a run's acceptance in another project's format into a folder named after the run, and return the files."""
    facts = {
        "dataset": dataset_name(run),
        "dtype": run.manifest["dtype"],
        "device": run.manifest["device"],
        "made with": " ".join(run.manifest["overrides"]) or "no overrides",
    }
    texts = exported(format, records_of(run.folder), run.manifest["target"]["name"], facts)
    return write_texts(out / run.folder.name, texts)


def published_table(rows: Sequence[Row], records: Sequence[Sequence[Record]], found: Sequence[Published]) -> Table:
    """A row for every published figure and row of ours that drafted as many tokens; else the figure alone.

    Args:
        rows: Of a comparison; those of plain decoding and of engines without rounds are left out.
        records: Of the run of each row.
        found: The published figures.
    """
    ours = [
        (row, own)
        for row, every in zip(rows, records, strict=True)
        if (own := [r for r in every if (r.method, r.temperature) == (row.method.method, row.method.temperature)])
        and row.method.proposed_nodes_per_round
    ]
    pairs = [
        Pair(theirs, *match)
        for theirs in found
        for match in [each for each in ours if drafted_of(each[1]) == theirs.drafted] or [(None, [])]
    ]
    return Table.of(
        pairs,
        [
            (left("published", fold=True, min_width=20), lambda pair: pair.theirs.name),
            ("drafted", lambda pair: number(pair.theirs.drafted, 0)),
            ("theirs", lambda pair: number(pair.theirs.length, 2)),
            (left("ours", fold=True, min_width=12), lambda pair: ", ".join(pair.row.name) if pair.row else "-"),
            ("mean\nacceptance\nlength", lambda pair: length(pair.row.method) if pair.row else "-"),
            (left("not alike", fold=True, min_width=20), lambda pair: "; ".join(unlike(pair))),
        ],
        title="Beside published acceptance lengths",
        notes=[
            "lengths count the target's own token; a curve is a figure of its model, its prompts and its temperature: "
            "where one of these differs, the difference says nothing about the drafters"
        ],
    )


def unlike(pair: Pair) -> list[str]:
    """In words, what differs between a published figure and a row of ours, or is not known."""
    theirs, row = pair.theirs, pair.row
    if row is None:
        return [f"no run of ours drafted {'as many' if theirs.drafted is None else theirs.drafted} tokens per round"]
    target, found = str(row.run.manifest["target"]["name"]), []
    if target.rpartition("/")[2].lower() not in theirs.name.lower():
        found.append(f"model (ours: {target})")
    if theirs.temperature is None:
        found.append("their temperature is not said")
    elif theirs.temperature != row.method.temperature:
        found.append(f"temperature {theirs.temperature:g}, ours {row.method.temperature:g}")
    categories = sorted({record.category for record in pair.records})
    if theirs.category is None:
        found.append("their prompts are not said")
    elif categories != [theirs.category]:
        found.append(f"prompts: {theirs.category}, ours {', '.join(filter(None, categories)) or 'without a category'}")
    if theirs.rounds is None:
        found.append("they give no interval")
    return found
