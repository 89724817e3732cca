"""A comparison of runs: its table, its remarks, its pictures, and the files that it leaves."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pandas
from rich.console import Console

from experiments.reporting import columns as cols
from experiments.reporting import terminal
from experiments.reporting.formats import USUAL, csv_text, document, write_formats, write_texts
from experiments.reporting.run_plots import acceptance_lines, length_and_speedup
from experiments.reporting.studies.two_way import report_two_way
from experiments.reporting.table import Col, Table, words
from experiments.reporting.terminal import short
from experiments.reporting.verdicts import joint, say_verdict, sentence
from experiments.results.comparison import Entry, best_of, commit_of, differences, entries_of, paired_differences, title
from experiments.results.frame import Frame
from experiments.results.lossless import NOT_LOSSLESS
from experiments.results.rows import ALL, RUNS, Row, typed
from experiments.results.runs import Run


def report_comparison(
    runs: Sequence[Run],
    out: Path,
    *,
    allow_mixed: bool = False,
    missing: Sequence[str] = (),
    formats: Sequence[str] = USUAL,
    difference: str | None = None,
) -> list[Entry]:
    """Print and write the comparison of runs.

    Args:
        out: Folder for ``comparison.json``, the table and the pictures.
        allow_mixed: Compare runs of different targets, datasets or dtypes, too, and say so.
        missing: Sentences about jobs without results, to be listed.
        formats: How the table is written (``experiments.reporting.formats``).
        difference: The setting whose values are compared prompt by prompt; None for the drafter.

    Raises:
        ValueError: The runs are not to be mixed, there is none, or they do not differ in the setting.
    """
    if not runs:
        raise ValueError("there are no runs to compare")
    mixed = differences(runs)
    if mixed and not allow_mixed:
        raise ValueError(f"the runs {'; '.join(mixed)}: allow_mixed=true compares them all the same")
    entries, about = entries_of(runs), title(runs)
    paired = paired_differences(entries, difference)  # refuses an unknown setting before anything is printed
    remarked = [*(f"MIXED: the runs {text}" for text in mixed), *remarks(runs)]
    bad = [sentence(entry.name, entry.row, entry.run) for entry in entries if entry.row["not_lossless"]]
    good = joint([{**entry.row, "name": entry.name} for entry in entries], "name")
    notes = [*remarked, *missing, *good, *bad]
    subtitle = "; ".join([about, *(note.partition(": ")[0] for note in remarked if note[:2].isupper())])
    table, console = comparison_table(entries, about), terminal.console()
    terminal.show(console, table)
    rows = [{"name": entry.name, "folder": str(entry.run.folder), **entry.row} for entry in entries]
    written = write_texts(out, {"comparison.json": {"title": about, "notes": notes, "rows": rows}})
    written += report_differences(entries, *paired, out, console)
    written += report_two_way(entries, out, console, notes=[note for note in remarked if note.startswith("NOISY")])
    for note in notes:
        say_verdict(console, note, bad=NOT_LOSSLESS in note)
    written += write_formats(
        formats,
        out,
        "comparison",
        document=_document(table, runs, notes),
        # Runs of different targets, datasets or dtypes have no best among them.
        table=comparison_table(entries, about, show_best=not mixed, notes=notes),
        figures=comparison_frame(entries),
    )
    terminal.list_written(console, [*written, *pictures(entries, out, subtitle)])
    return entries


def pictures(entries: Sequence[Entry], out: Path, subtitle: str) -> list[Path]:
    """Draw the pictures of a comparison into a folder; none where nothing was drafted."""
    named = [(entry.name, entry.row) for entry in entries]
    both = length_and_speedup(named, out / "comparison.png", "Acceptance and speed over plain decoding", subtitle)
    return [path for path in (both, acceptance_lines(named, out / "acceptance.png", subtitle)) if path is not None]


def comparison_table(
    entries: Sequence[Entry], text: str, *, show_best: bool = False, notes: Sequence[str] = ()
) -> Table:
    """A row per method, temperature and run."""
    ranked = ["mean_acceptance_length", "speedup"]
    if len({entry.run.manifest["device"] for entry in entries}) == 1:  # else the devices would win, not the methods
        ranked.append("tokens_per_second")
    rows: list[Row] = [
        entry.row
        | {"parts": entry.parts, "plain": None if entry.plain is None else entry.plain["tokens_per_second"]}
        | dict.fromkeys(["best.mean_acceptance_length", "best.speedup"])
        for entry in entries
    ]
    bold, temperatures = False, {entry.row["temperature"] for entry in entries} if show_best else ()
    for temperature, figure in itertools.product(temperatures, ranked):
        places = [number for number, entry in enumerate(entries) if entry.row["temperature"] == temperature]
        if (best := best_of([entries[place] for place in places], figure)) is not None:
            rows[places[best]][f"best.{figure}"] = bold = True
    spreads = sorted({row["noise_spread"] for row in rows if row["noise_spread"]})
    varies = " to ".join(dict.fromkeys(f"±{value:.0%}" for value in (*spreads[:1], *spreads[-1:])))
    about = [
        f"intervals at {rows[0]['confidence']:.0%}",
        cols.rules_of(rows) or "acceptance rule: none",
        *([cols.BOLD] if bold else []),
        *([f"timings vary by {varies} between batches"] if varies else []),
    ]
    columns = [
        cols.T,
        words("method and settings", lambda row: cols.method_cell(row, *row["parts"], joint=", "), min_width=24),
        cols.unless_plain(Col("mean\nacceptance\nlength", "mean_acceptance_length", best=True)),
        *(Col("speedup", "speedup", ".2fx", best=True), Col("tokens/s", "tokens_per_second", ".1f", best=True)),
        *(Col("plain's", "plain", ".1f"), cols.ACCEPTED, cols.NODES, cols.DISTINCT, cols.EQUAL),
    ]
    notes = [*about, *notes]
    return Table.of(rows, columns, title=text, notes=notes, section=lambda row: row["temperature"])


def comparison_frame(entries: Sequence[Entry]) -> Frame:
    """The rows behind the table in full precision: the columns of ``results.load(…).runs``, and each row's name."""
    rows = [
        {"name": entry.name, **row}
        for entry in entries
        for row in entry.run.described
        if (row["method"], row["temperature"]) == (entry.row["method"], entry.row["temperature"])
    ]
    return typed(rows, {"name": "string", **RUNS})


def _document(table: Table, runs: Sequence[Run], notes: Sequence[str]) -> str:
    """The table in Markdown, with its remarks and where the numbers come from."""
    commits = sorted({commit_of(run.manifest) for run in runs})
    common = set.intersection(*(set(run.manifest.get("overrides", [])) for run in runs))
    given = [text for text in runs[0].manifest.get("overrides", []) if text in common and not text.startswith("out=")]
    made = f"Made at commit {', '.join(commits)} with `{' '.join(given) or 'the defaults'}`."
    return document(f"{title(runs)}; intervals at {runs[0].rows[0]['confidence']:.0%}.", table, notes, made)


def remarks(runs: Sequence[Run]) -> list[str]:
    """Sentences that a reader of the table needs: unfinished runs, different devices, noise, failed prompts."""
    devices, noisy = sorted({run.manifest["device"] for run in runs}), [run for run in runs if run.noisy]
    left = "INCOMPLETE: {} has not finished its {} prompts"
    notes = [left.format(short(run.folder), run.rows[0]["planned"]) for run in runs if not run.complete]
    if len(devices) > 1:
        notes.append(f"The runs were made on different devices ({', '.join(devices)}): tokens/s do not compare.")
    if noisy:
        listed = ", ".join([*(short(run.folder) for run in noisy[:3]), *(["…"] if noisy[3:] else [])])
        repeat = f"repeat them on an idle machine before you rely on speeds ({listed})."
        notes.append(f"NOISY TIMINGS in {len(noisy)} of {len(runs)} runs: {repeat}")
    if failed := sum(row["failed"] for run in runs for row in run.rows):
        notes.append(f"{failed} prompts failed, and count nowhere: see the runs' own tables.")
    return list(dict.fromkeys(notes))


def report_differences(
    entries: Sequence[Entry], name: str, rows: Sequence[Row], out: Path, console: Console
) -> list[Path]:
    """Print the paired differences over all prompts, and write all of them into two files, where there are any."""
    if not rows:
        return []
    seeds = {(entry.run.manifest.get("seeds") or {}).get("sampling") for entry in entries}
    sampled = any(entry.row["temperature"] > 0 for entry in entries)
    notes = [
        "tokens per round, on the prompts that both have finished",
        f"brackets: {entries[0].row['confidence']:.0%} intervals, prompts drawn in pairs",
        *cols.of_few(row["prompts"] for row in rows),
        *(["the runs have different seeds: draws add to the differences"] if sampled and len(seeds) > 1 else []),
    ]
    about = f"Differences by {name}"
    terminal.show(console, differences_table([row for row in rows if row["category"] == ALL], about, notes))
    full = document(f"{about} ({'; '.join(notes)})", differences_table(rows, about, notes))
    return write_texts(out, {"differences.md": full, "differences.csv": csv_text(pandas.DataFrame(rows))})


def differences_table(rows: Sequence[Row], title: str, notes: Sequence[str]) -> Table:
    """A row per pair of methods, and per category of prompts if there are several."""
    names = list(rows[0])[: list(rows[0]).index("category")]
    columns = [
        *(words(name, name) for name in names),
        *([words("prompts of", "category")] if any(row["category"] != ALL for row in rows) else []),
        words("compared", lambda row: f"{row['compared']} - {row['reference']}", min_width=20),
        *(Col("length", "length"), Col("reference's", "reference_length"), Col("difference", "difference", "+.2f")),
        Col("prompts", "prompts", "d"),
    ]
    keys = (*names, "compared", "reference")
    return Table.of(rows, columns, title=title, notes=notes, section=lambda row: [row[name] for name in keys])
