"""A comparison of runs: its table, its remarks, and the files that it leaves."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.reporting import markdown, terminal
from experiments.reporting.cells import equality, lossiness, number, percent, times, with_interval
from experiments.reporting.comparison_plots import acceptance_lines, comparison_plot
from experiments.reporting.formats import USUAL, write_formats
from experiments.reporting.requests import warnings_of
from experiments.reporting.run_tables import BOLD
from experiments.reporting.table import Cell, Column, Emphasis, Table
from experiments.reporting.terminal import short
from experiments.reporting.two_way import report_two_way
from experiments.reporting.verdicts import counted, say_verdict, sentence
from experiments.results.comparison import Row, best_of, commit_of, differences, make_rows, title
from experiments.results.lossless import NOT_LOSSLESS
from experiments.results.plain_json import json_text
from experiments.results.runs import Run

if TYPE_CHECKING:
    import pandas

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


_TOO_LONG = {"cut": "were shortened", "skipped": "were left out", "failing": "failed as too long"}


def report_comparison(
    runs: Sequence[Run],
    out: Path,
    *,
    allow_mixed: bool = False,
    missing: Sequence[str] = (),
    formats: Sequence[str] = USUAL,
) -> list[Row]:
    """Print and write the comparison of runs.

    Args:
        runs: The runs.
        out: Folder for ``comparison.json``, the table and the pictures.
        allow_mixed: Compare runs of different targets, datasets or dtypes, too, and say so.
        missing: Sentences about jobs without results, to be listed.
        formats: How the table is written (``experiments.reporting.formats``).

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
    # A picture has no room for a list of folders.
    said = [note.partition(" in ")[0] if note.startswith("NOISY") else note for note in notes]
    subtitle = "; ".join([title(runs), *(note for note in said if note.startswith(("MIXED", "INCOMPLETE", "NOISY")))])
    two_way = report_two_way(rows, out, subtitle, console)
    for note in notes:
        say_verdict(console, note, bad=NOT_LOSSLESS in note)
    figures = [{"name": ", ".join(row.name), "folder": str(row.run.folder), **asdict(row.method)} for row in rows]
    text = json_text({"title": title(runs), "notes": notes, "rows": figures})
    (out / "comparison.json").write_text(text, encoding="utf-8")
    written = write_formats(
        formats,
        out,
        "comparison",
        document=document(table, runs, notes),
        # Runs of different targets, datasets or dtypes have no best among them.
        table=comparison_table(rows, title(runs), show_best=not mixed, notes=notes),
        figures=lambda: comparison_figures(rows),
    )
    written.append(out / "comparison.json")
    written += two_way
    for plot, name in ((comparison_plot, "comparison.png"), (acceptance_lines, "acceptance.png")):
        path = plot(rows, out / name, subtitle)
        written += [path] if path is not None else []
    terminal.list_written(console, written)
    return rows


def comparison_table(rows: Sequence[Row], text: str, *, show_best: bool = False, notes: Sequence[str] = ()) -> Table:
    """A row per method, temperature and run.

    Args:
        rows: The rows.
        text: The title.
        show_best: Make the best figures stand out, by temperature (``best_of``).
        notes: Further sentences below the table.
    """
    rules = sorted({row.method.exactness for row in rows if row.method.exactness is not None})
    level = f"intervals at {rows[0].run.summary.confidence:.0%}"
    best = _best(rows) if show_best else {}
    runs = list({row.run.folder: row.run for row in rows}.values())
    rule = f"acceptance rule: {', '.join(rules) or 'none'}"
    remarks = [level, rule, *([BOLD] if any(best.values()) else []), *_spread(runs), *notes]
    table = Table(COLUMNS, text, remarks)
    for index, row in enumerate(rows):
        method = row.method
        emphasis = {name: Emphasis.BEST if index in found else Emphasis.NONE for name, found in best.items()}
        table.add(
            f"{method.temperature:g}",
            Cell(row.name[0], row.name[1:], joint=", ", emphasis=lossiness(method.exactness)),
            with_interval(
                number(method.mean_acceptance_length),
                method.mean_acceptance_length_interval,
                emphasis=emphasis.get("mean_acceptance_length", Emphasis.NONE),
            ),
            with_interval(
                times(method.speedup), method.speedup_interval, emphasis=emphasis.get("speedup", Emphasis.NONE)
            ),
            Cell(
                number(method.tokens_per_second, 1),
                emphasis=emphasis.get("tokens_per_second", Emphasis.NONE),
            ),
            number(row.plain.tokens_per_second if row.plain is not None else None, 1),
            percent(method.draft_acceptance_rate),
            number(method.proposed_nodes_per_round, 1),
            percent(method.distinct_4_gram_rate),
            equality(method),
            end_section=index + 1 == len(rows) or rows[index + 1].method.temperature != method.temperature,
        )
    return table


def _best(rows: Sequence[Row]) -> dict[str, set[int]]:
    """Numbers of the rows that have the best figure of their temperature, by figure."""
    figures = ["mean_acceptance_length", "speedup"]
    if len({row.run.manifest["device"] for row in rows}) == 1:  # else the devices would win, not the methods
        figures.append("tokens_per_second")
    return {figure: best_of(rows, figure) for figure in figures}


def comparison_figures(rows: Sequence[Row]) -> "pandas.DataFrame":
    """The figures behind the table in full precision: the columns of ``results.load(…).runs``, and the row's name."""
    # Imported when asked for: pandas takes a while, and a sweep's jobs do not need it.
    import pandas

    from experiments.results import schema
    from experiments.results.data import method_rows, typed

    figures = [
        {"name": ", ".join(row.name), **found}
        for row in rows
        for found in method_rows(asdict(row.run.summary), row.run.folder, row.run.manifest, [asdict(row.method)])
    ]
    return typed(pandas.DataFrame(figures), {"name": "string", **schema.RUNS})


def document(table: Table, runs: Sequence[Run], notes: Sequence[str]) -> str:
    """The table in Markdown, with its remarks and where the numbers come from."""
    lines = [f"{title(runs)}; intervals at {runs[0].summary.confidence:.0%}.", "", markdown.render(table).rstrip()]
    lines += ["", *(f"- {note}" for note in notes)] if notes else []
    commits = sorted({commit_of(run.manifest) for run in runs})
    common = set.intersection(*(set(run.manifest.get("overrides", [])) for run in runs))
    given = [text for text in runs[0].manifest.get("overrides", []) if text in common and not text.startswith("out=")]
    lines += ["", f"Made at commit {', '.join(commits)} with `{' '.join(given) or 'the defaults'}`."]
    return "\n".join(lines) + "\n"


def _spread(runs: Sequence[Run]) -> list[str]:
    """How much timings vary between batches, from the calmest run to the noisiest."""
    known = [run.summary.noise.spread for run in runs if run.summary.noise is not None]
    found = sorted({f"±{spread:.0%}" for spread in known if spread is not None}, key=lambda text: int(text[1:-1]))
    if not found:
        return []
    return [f"timings vary by {found[0]}{f' to {found[-1]}' if found[1:] else ''} between batches"]


def _too_long(runs: Sequence[Run]) -> list[str]:
    """What became of prompts that did not fit, each once."""
    told = []
    for facts in (run.manifest.get("too_long") for run in runs):
        if facts:
            done = [f"{facts[key]} {word}" for key, word in _TOO_LONG.items() if facts[key]]
            told.append(f"of {facts['of']}, {' and '.join(done)} (room for {facts['room']} tokens)")
    return list(dict.fromkeys(told))


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
    noisy = [short(run.folder) for run in runs if run.summary.noise is not None and run.summary.noise.noisy]
    if noisy:
        notes.append(
            f"NOISY TIMINGS in {len(noisy)} of {len(runs)} runs ({', '.join(noisy[:3])}{', …' if noisy[3:] else ''}): "
            f"repeat them on an idle machine before you rely on tokens/s and speedup."
        )
    notes += [f"Prompts that were too long: {text}." for text in _too_long(runs)]
    notes += [f"{short(run.folder)}: {text}" for run in runs for text in warnings_of(run.summary)]
    failed = sum(run.summary.failed for run in runs)
    if failed:
        notes.append(f"{failed} prompts failed, and count nowhere: see the runs' own tables.")
    return notes
