"""Tokens per round of what a study varies in two ways, and nothing that depends on time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.reporting import style
from experiments.reporting.columns import FAMILY, NODES
from experiments.reporting.formats import document, publish
from experiments.reporting.run_plots import alarm_of
from experiments.reporting.table import NOTHING, Cell, Col, Table, words
from experiments.results.comparison import commit_of, dataset_name
from experiments.results.records import PLAIN
from experiments.results.rows import Row, ends, interval
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap
from experiments.results.timing import gain_over

Placed = tuple[Run, Row]
LENGTH = "mean_acceptance_length"


def report_lengths(
    runs: Sequence[Run], folder: Path, *, rows: str, about: str, columns: Mapping[str, str], missing: Sequence[str] = ()
) -> None:
    """Print a table, and write it with a picture of the same into a folder: ``lengths.md`` and ``lengths.png``.

    Args:
        runs: One whose labels are "column: row", or a sweep's, of which each is a column.
        rows: Heading of the rows' names.
        columns: Parts of the names of a sweep's columns, by the overrides that make them, as Hydra writes them.

    Raises:
        ValueError: Two methods have one place.
    """
    cells: dict[tuple[float, str, str], Placed] = {}  # by temperature, row and column
    for run in runs:
        column = ", ".join(name for override, name in columns.items() if override in run.manifest["overrides"])
        for row in run.rows:
            if row["method"] == PLAIN or not row["finished"]:
                continue
            label = row["label"]
            head, _, name = (column, "", label) if column else label.rpartition(FAMILY)
            if (row["temperature"], name, head) in cells:
                raise ValueError(
                    f"{name!r} stands twice in the column {head!r}: name what differs in labels or columns"
                )
            cells[row["temperature"], name, head] = run, row
    temperatures, names, heads = (list(dict.fromkeys(parts)) for parts in zip(*cells, strict=True))
    temperatures.sort()
    reference = "" if columns else names[0]
    signed = f"signed: more than {reference} has in the same column, on the same prompts and given the drafts"
    table = Table.of(
        [(temperature, name) for temperature in temperatures for name in names],
        [
            Col("T", lambda at: f"{at[0]:g}"),
            words(rows, lambda at: at[1]),
            *(
                Col(head, lambda at, head=head: _cell(cells.get((*at, head)), cells.get((at[0], reference, head))))
                for head in heads
            ),
        ],
        title=about,
        notes=[
            "tokens per round / drafted nodes per round",
            *([] if columns else [signed, "starred: an interval without zero"]),
            *missing,
        ],
        section=lambda at: at[0],
    )
    series: dict[str, dict[int, Row]] = {head: {place: {} for place in range(len(names))} for head in heads}
    for (temperature, name, head), (_, row) in cells.items():
        drawn = {f"{temperature:g}": row[LENGTH], **ends(f"{temperature:g}", interval(row, LENGTH))}
        series[head][names.index(name)].update(drawn)
    made = _made_with(*runs)
    publish(
        folder,
        "lengths",
        tables=[table],
        document=document(made, f"In a cell: {'; '.join(table.notes)}.", table),
        drawn=lambda: [
            style.rows_plot(
                folder / "lengths.png",
                names,
                {f"tokens per round, T = {temperature:g}": (f"{temperature:g}", 1.0) for temperature in temperatures},
                series,
                about=f"{about}, with {runs[0].rows[0]['confidence']:.0%} intervals",
                subtitle=made.partition(". ")[0],
                alarm=alarm_of([(row["method"], row) for run in runs for row in run.rows]),
            )
        ],
    )


def _made_with(run: Run, *others: Run) -> str:
    """The origin of a run, or of several of other targets and prompts, and what brackets are, in two sentences."""
    manifest, config = run.manifest, run.manifest["config"]
    facts = [
        " and ".join(dict.fromkeys(other.manifest["target"]["name"] for other in (run, *others))),
        manifest["dtype"],
        " and ".join(dict.fromkeys(map(dataset_name, (run, *others)))),
        f"{config['sampling']['max_new_tokens']} new tokens",
        f"batch {config['engine']['max_batch_size']}",
        f"{manifest['threads']} thread{'s' if manifest['threads'] != 1 else ''} of {manifest['device']}",
        f"commit {commit_of(manifest)}",
    ]
    return f"{', '.join(facts)}. Brackets are {run.rows[0]['confidence']:.0%} intervals over prompts."


def _cell(placed: Placed | None, first: Placed | None) -> Cell:
    """A method's tokens per round, how many more these are than those of its column's first row, and its nodes."""
    if placed is None:
        return Cell(NOTHING)
    run, row = placed
    cell = Col("", LENGTH).cell(row)
    more = [*cell.more]
    if first is not None and first is not placed:
        outputs, others = run.of(row), first[0].of(first[1])
        assert outputs is not None and others is not None, "runs that were read have outputs"
        gain = gain_over(outputs, others, Bootstrap(**run.manifest["config"]["bootstrap"]))
        if gain is not None:
            sure = gain.interval is not None and gain.interval[0] * gain.interval[1] > 0
            more.append(f"{gain.difference:+.2f}{'*' if sure else ''}")
    return Cell(cell.text, [*more, f"/ {NODES.cell(row).text}"])
