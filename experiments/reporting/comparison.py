"""A comparison of runs: its table, its remarks, and the files that it leaves."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.reporting import csv, markdown, terminal
from experiments.reporting.cells import equality, lossiness, number, percent, times, with_interval
from experiments.reporting.comparison_plots import acceptance_lines, comparison_plot
from experiments.reporting.table import Cell, Column, Table
from experiments.reporting.terminal import short
from experiments.reporting.verdicts import counted, say_verdict, sentence
from experiments.results.comparison import Row, commit_of, differences, make_rows, title
from experiments.results.lossless import NOT_LOSSLESS
from experiments.results.plain_json import json_text
from experiments.results.runs import Run

COLUMNS = (
    Column("T"),
    Column("method and settings", "left", fold=True, min_width=24),
    Column("mean\nacceptance\nlength"),
    Column("speedup"),
    Column("tokens/s"),
    Column("plain's"),
    Column("draft\naccepted"),
    Column("nodes/\nround"),
    Column("distinct\n4-grams"),
    Column("equal\nto plain"),
)


def report_comparison(
    runs: Sequence[Run], out: Path, *, allow_mixed: bool = False, missing: Sequence[str] = ()
) -> list[Row]:
    """Print and write the comparison of runs.

    Args:
        runs: The runs.
        out: Folder for ``comparison.md``, ``.csv``, ``.json`` and the pictures.
        allow_mixed: Compare runs of different targets, datasets or dtypes, too, and say so.
        missing: Sentences about jobs without results, to be listed.

    Raises:
        ValueError: The runs are not to be mixed, or there is none.
    """
    if not runs:
        raise ValueError("there are no runs to compare")
    mixed = differences(runs)
    if mixed and not allow_mixed:
        raise ValueError(f"the runs {'; '.join(mixed)}: allow_mixed=true compares them all the same")
    rows = make_rows(runs)
    notes = [*(f"MIXED: the runs {text}" for text in mixed), *remarks(runs), *missing, *verdicts(rows)]
    out.mkdir(parents=True, exist_ok=True)
    table = comparison_table(rows, title(runs))
    console = terminal.console()
    console.print(terminal.render(table, terminal.Frame.NARROW))
    for note in notes:
        say_verdict(console, note, bad=NOT_LOSSLESS in note)
    figures = [{"name": ", ".join(row.name), "folder": str(row.run.folder), **asdict(row.method)} for row in rows]
    text = json_text({"title": title(runs), "notes": notes, "rows": figures})
    contents = {
        "comparison.md": document(table, runs, notes),
        "comparison.csv": csv.render(table),
        "comparison.json": text,
    }
    written = []
    for name, content in contents.items():
        (out / name).write_text(content, encoding="utf-8")
        written.append(out / name)
    subtitle = "; ".join([title(runs), *(note for note in notes if note.startswith(("MIXED", "INCOMPLETE")))])
    for plot, name in ((comparison_plot, "comparison.png"), (acceptance_lines, "acceptance.png")):
        path = plot(rows, out / name, subtitle)
        written += [path] if path is not None else []
    terminal.list_written(console, written)
    return rows


def comparison_table(rows: Sequence[Row], text: str) -> Table:
    """A row per method, temperature and run."""
    rules = sorted({row.method.exactness for row in rows if row.method.exactness is not None})
    level = f"intervals at {rows[0].run.summary.confidence:.0%}"
    table = Table(COLUMNS, text, [level, f"acceptance rule: {', '.join(rules) or 'none'}"])
    for index, row in enumerate(rows):
        method = row.method
        table.add(
            f"{method.temperature:g}",
            Cell(row.name[0], row.name[1:], joint=", ", emphasis=lossiness(method.exactness)),
            with_interval(number(method.mean_acceptance_length), method.mean_acceptance_length_interval),
            with_interval(times(method.speedup), method.speedup_interval),
            number(method.tokens_per_second, 1),
            number(row.plain.tokens_per_second if row.plain is not None else None, 1),
            percent(method.draft_acceptance_rate),
            number(method.proposed_nodes_per_round, 1),
            percent(method.distinct_4_gram_rate),
            equality(method),
            end_section=index + 1 == len(rows) or rows[index + 1].method.temperature != method.temperature,
        )
    return table


def document(table: Table, runs: Sequence[Run], notes: Sequence[str]) -> str:
    """The table in Markdown, with its remarks and where the numbers come from."""
    lines = [f"{title(runs)}; intervals at {runs[0].summary.confidence:.0%}.", "", markdown.render(table).rstrip()]
    lines += ["", *(f"- {note}" for note in notes)] if notes else []
    commits = sorted({commit_of(run.manifest) for run in runs})
    common = set.intersection(*(set(run.manifest.get("overrides", [])) for run in runs))
    given = [text for text in runs[0].manifest.get("overrides", []) if text in common and not text.startswith("out=")]
    lines += ["", f"Made at commit {', '.join(commits)} with `{' '.join(given) or 'the defaults'}`."]
    return "\n".join(lines) + "\n"


def verdicts(rows: Sequence[Row]) -> list[str]:
    """What the rows say about losslessness: one sentence on all, and one on each that is not lossless."""
    overall = counted([row.method for row in rows])
    bad = [
        sentence(", ".join(row.name), row.method.lossless)
        for row in rows
        if row.method.lossless is not None and row.method.not_lossless
    ]
    return [*([] if overall is None else [overall]), *bad]


def remarks(runs: Sequence[Run]) -> list[str]:
    """Sentences that a reader of the table needs: unfinished runs, different devices, failed prompts."""
    notes = [
        f"INCOMPLETE: {short(run.folder)} has not finished its {run.summary.planned} prompts"
        for run in runs
        if not run.summary.complete
    ]
    devices = sorted({run.manifest["device"] for run in runs})
    if len(devices) > 1:
        notes.append(
            f"The runs were made on different devices ({', '.join(devices)}): compare no tokens/s across them."
        )
    failed = sum(run.summary.failed for run in runs)
    if failed:
        notes.append(f"{failed} prompts failed, and count nowhere: see the runs' own tables.")
    return notes
