"""A comparison of runs: its table, its remarks, its pictures, and the files that it leaves."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.reporting import style, terminal
from experiments.reporting.acceptance import report_acceptance
from experiments.reporting.cells import BOLD, equality, label_cell, length, number, percent, rules_of, speedup
from experiments.reporting.formats import USUAL, document, write_formats, write_texts
from experiments.reporting.requests import warnings_of
from experiments.reporting.run_plots import length_and_speedup
from experiments.reporting.run_tables import prompts_needed
from experiments.reporting.table import Cell, Emphasis, Table, left
from experiments.reporting.terminal import short
from experiments.reporting.two_way import report_two_way
from experiments.reporting.verdicts import counted, say_verdict, sentence, warning
from experiments.results.comparison import Row, best_of, commit_of, differences, make_rows, title
from experiments.results.lossless import NOT_LOSSLESS
from experiments.results.runs import Run

if TYPE_CHECKING:
    import pandas

_TOO_LONG = {"cut": "were shortened", "skipped": "were left out", "failing": "failed as too long"}
_LINES = ("-", "--", ":")


def report_comparison(
    runs: Sequence[Run],
    out: Path,
    *,
    allow_mixed: bool = False,
    missing: Sequence[str] = (),
    formats: Sequence[str] = USUAL,
    difference: str | None = None,
) -> list[Row]:
    """Print and write the comparison of runs.

    Args:
        out: Folder for ``comparison.json``, the table and the pictures.
        allow_mixed: Compare runs of different targets, datasets or dtypes, too, and say so.
        missing: Sentences about jobs without results, to be listed.
        formats: How the table is written (``experiments.reporting.formats``).
        difference: The setting whose values are compared prompt by prompt; None for the drafter.

    Raises:
        ValueError: The runs are not to be mixed, or there is none.
    """
    if not runs:
        raise ValueError("there are no runs to compare")
    mixed = differences(runs)
    if mixed and not allow_mixed:
        raise ValueError(f"the runs {'; '.join(mixed)}: allow_mixed=true compares them all the same")
    rows, about = make_rows(runs), title(runs)
    notes = [*(f"MIXED: the runs {text}" for text in mixed), *remarks(runs), *missing, *_verdicts(rows)]
    table, console = comparison_table(rows, about), terminal.console()
    terminal.show(console, table)
    # A picture has no room for lists of folders and of values.
    ends = {"NOISY": ("", " in "), "MIXED": ("MIXED: ", ": "), "INCOMPLETE": ("", "\n")}
    told = [
        start + note.removeprefix(start).partition(end)[0]
        for note in notes
        for word, (start, end) in ends.items()
        if note.startswith(word)
    ]
    subtitle = "; ".join([about, *told])
    figures = [{"name": ", ".join(row.name), "folder": str(row.run.folder), **row.method} for row in rows]
    written = write_texts(out, {"comparison.json": {"title": about, "notes": notes, "rows": figures}})
    noise = [note for note in notes if note.startswith("NOISY")]
    written += report_acceptance(rows, out, console, setting=difference)
    written += report_two_way(rows, out, subtitle, console, notes=noise)
    for note in notes:
        say_verdict(console, note, bad=NOT_LOSSLESS in note)
    written += write_formats(
        formats,
        out,
        "comparison",
        document=_document(table, runs, notes),
        # Runs of different targets, datasets or dtypes have no best among them.
        table=comparison_table(rows, about, show_best=not mixed, notes=notes),
        figures=lambda: comparison_figures(rows),
    )
    terminal.list_written(console, [*written, *(plot(rows, out / name, subtitle) for name, plot in PLOTS.items())])
    return rows


def comparison_table(rows: Sequence[Row], text: str, *, show_best: bool = False, notes: Sequence[str] = ()) -> Table:
    """A row per method, temperature and run."""
    figures = ["mean_acceptance_length", "speedup"]
    if len({row.run.manifest["device"] for row in rows}) == 1:  # else the devices would win, not the methods
        figures.append("tokens_per_second")
    best = {figure: [id(rows[n]) for n in best_of(rows, figure)] for figure in figures} if show_best else {}
    spreads = {row.run.folder: row.run.summary.noise.spread for row in rows}.values()
    spread = sorted(each for each in spreads if each)
    varies = " to ".join(dict.fromkeys(f"±{value:.0%}" for value in (*spread[:1], *spread[-1:])))
    summary = rows[0].run.summary
    about = [
        f"intervals at {summary.confidence:.0%}{prompts_needed([row.method for row in rows], summary.width)}",
        rules_of(row.method for row in rows) or "acceptance rule: none",
        *([BOLD] if any(best.values()) else []),
        *([f"timings vary by {varies} between batches"] if varies else []),
    ]

    def leads(row: Row, figure: str) -> bool:
        return id(row) in best.get(figure, ())

    def named(row: Row) -> Cell:
        return label_cell(row.method, *row.name, joint=", ")

    def speed(row: Row) -> Cell:
        emphasis = Emphasis.BEST if leads(row, "tokens_per_second") else Emphasis.NONE
        return Cell(number(row.method.tokens_per_second, 1), emphasis=emphasis)

    return Table.of(
        rows,
        [
            ("T", lambda row: f"{row.method.temperature:g}"),
            (left("method and settings", fold=True, min_width=24), named),
            ("mean\nacceptance\nlength", lambda row: length(row.method, best=leads(row, "mean_acceptance_length"))),
            ("speedup", lambda row: speedup(row.method, best=leads(row, "speedup"))),
            ("tokens/s", speed),
            ("plain's", lambda row: number(row.plain.tokens_per_second if row.plain is not None else None, 1)),
            ("draft\naccepted", lambda row: percent(row.method.draft_acceptance_rate)),
            ("nodes/\nround", lambda row: number(row.method.proposed_nodes_per_round, 1)),
            ("distinct\n4-grams", lambda row: percent(row.method.distinct_4_gram_rate)),
            ("equal\nto plain", lambda row: equality(row.method)),
        ],
        title=text,
        notes=[*about, *notes],
        section=lambda row: row.method.temperature,
    )


def comparison_figures(rows: Sequence[Row]) -> "pandas.DataFrame":
    """The figures behind the table in full precision: the columns of ``results.load(…).runs``, and the row's name."""
    # Imported when asked for: pandas takes a while, and a sweep's jobs do not need it.
    import pandas

    from experiments.results.data import RUNS, method_rows, typed

    figures = [
        {"name": ", ".join(row.name), **found}
        for row in rows
        for found in method_rows(row.run.summary, row.run.folder, row.run.manifest, [row.method])
    ]
    return typed(pandas.DataFrame(figures), {"name": "string", **RUNS})


def _document(table: Table, runs: Sequence[Run], notes: Sequence[str]) -> str:
    """The table in Markdown, with its remarks and where the numbers come from."""
    commits = sorted({commit_of(run.manifest) for run in runs})
    common = set.intersection(*(set(run.manifest.get("overrides", [])) for run in runs))
    given = [text for text in runs[0].manifest.get("overrides", []) if text in common and not text.startswith("out=")]
    return document(
        f"{title(runs)}; intervals at {runs[0].summary.confidence:.0%}.",
        table,
        notes,
        f"Made at commit {', '.join(commits)} with `{' '.join(given) or 'the defaults'}`.",
    )


def _verdicts(rows: Sequence[Row]) -> list[str]:
    """Losslessness in sentences: one on all rows, and one on each that is not lossless."""
    overall = counted([row.method for row in rows])
    bad = [sentence(", ".join(row.name), row.method.lossless) for row in rows if row.method.not_lossless]
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
    noisy = [short(run.folder) for run in runs if run.summary.noise.noisy]
    if noisy:
        notes.append(
            f"NOISY TIMINGS in {len(noisy)} of {len(runs)} runs ({', '.join(noisy[:3])}{', …' if noisy[3:] else ''}): "
            f"repeat them on an idle machine before you rely on tokens/s and speedup."
        )
    for facts in (run.manifest.get("too_long") for run in runs):
        if facts:
            done = " and ".join(f"{facts[key]} {word}" for key, word in _TOO_LONG.items() if facts[key])
            room = f"(room for {facts['room']} tokens)"
            notes.append(f"Prompts that were too long: of {facts['of']}, {done} {room}.")
    notes += [f"{short(run.folder)}: {text}" for run in runs for text in warnings_of(run.summary)]
    for held in (run.manifest.get("licenses") for run in runs):
        if held:
            notes.append(f"Licences of the prompts: {'; '.join(f'{name} ({count})' for name, count in held.items())}.")
    failed = sum(run.summary.failed for run in runs)
    if failed:
        notes.append(f"{failed} prompts failed, and count nowhere: see the runs' own tables.")
    return list(dict.fromkeys(notes))


def conditions_of(runs: Sequence[Run], *facts: Callable[[Run], str]) -> list[str]:
    """Target, dtype, device and further facts of a sweep's runs, each run's own where they differ, and warnings."""
    shared = (lambda run: run.manifest["target"]["name"], lambda run: run.manifest["dtype"])
    values = [{fact(run) for run in runs} for fact in (*shared, lambda run: run.manifest["device"], *facts)]
    unfinished = sum(not run.summary.complete for run in runs)
    noisy = sum(bool(run.summary.noise.noisy) for run in runs)
    return [
        *(" or ".join(sorted(each)) for each in values),
        *([f"INCOMPLETE: {unfinished} of {len(runs)} runs"] if unfinished else []),
        *([f"NOISY TIMINGS in {noisy} of {len(runs)} runs"] if noisy else []),
    ]


def comparison_plot(rows: Sequence[Row], path: Path, subtitle: str) -> Path | None:
    """Mean acceptance length and speedup with their intervals, a line per method and settings; None without any."""
    entries = [(", ".join(row.name), row.method) for row in rows]
    about = "Acceptance and speed over plain decoding"
    return length_and_speedup(entries, path, about, subtitle, rows[0].run.summary) if rows else None


@style.styled()
def acceptance_lines(rows: Sequence[Row], path: Path, subtitle: str) -> Path | None:
    """Acceptance by draft position, a panel per temperature and a line per method and settings; None without drafts."""
    rows = [row for row in rows if row.method.acceptance_by_position.rounds]
    if not rows:
        return None
    names = list(dict.fromkeys(", ".join(row.name) for row in rows))
    temperatures = sorted({row.method.temperature for row in rows})
    figure, panels = style.by_temperature(temperatures, per_panel=2.2, more=0.8 + 0.07 * len(names))
    for row in sorted(rows, key=lambda row: names.index(", ".join(row.name))):
        name, values = ", ".join(row.name), row.method.acceptance_by_position.unconditional
        index = names.index(name)
        line = _LINES[index // len(style.COLORS) % len(_LINES)]
        looks, places = {"label": style.wrapped(name, 50), **style.looks(index)}, range(1, len(values) + 1)
        panels[row.method.temperature].plot(places, values, linestyle=line, **looks)
    for panel in panels.values():
        style.positions(panel, label="position in the draft")
    panels[temperatures[0]].set_ylabel("rounds that accepted so far,\nof those that drafted so far")
    style.legend_of(figure, *panels.values())
    alarm = warning([", ".join(row.name) for row in rows if row.method.not_lossless])
    about = "Acceptance by position in the draft (1 = first drafted token)"
    return style.finish(figure, path, about, subtitle, alarm=alarm)


PLOTS = {"comparison.png": comparison_plot, "acceptance.png": acceptance_lines}
"""The pictures of a comparison, by file name."""
