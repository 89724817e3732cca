"""What requests felt under load: tables over rates and methods, by class, and everything that belongs to a report."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.load.figures import by_class, figures_of, knee
from experiments.load.run import LoadRun
from experiments.load.studies import Study, check_alike, merged, remarks, terms_of, title_of
from experiments.reporting import terminal
from experiments.reporting.columns import NOTHING, milliseconds, number, percent, three_digits
from experiments.reporting.formats import document, write_texts
from experiments.reporting.load_pays import pays, pays_plot, pays_table
from experiments.reporting.load_plots import PLOTS, X, classes_plot
from experiments.reporting.table import Cell, Column, Table, left
from experiments.results.comparison import commit_of
from experiments.results.frame import Figures
from experiments.results.limits import Terms
from experiments.results.statistics import Bootstrap

LOOPS = {
    "open": "open loop: requests arrive whatever the engine does",
    "closed": "closed loop: a user's next request comes after the answer, which hides overload",
}
"""Stands on every table and picture."""
RATES = {"open": "requests/s arriving", "closed": "users"}
ATTAINED = (0.9, 0.99)
"""Shares of requests within all limits for which the highest rate is told."""
_ENGINE, _REQUESTS = 1, 2
"""The rows of the viewer of timelines: processes."""
_PHASES = {
    "queue": ("arrived", "admitted"),
    "prefill": ("admitted", "first_token"),
    "decode": ("first_token", "finished"),
}


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """How runs are reported.

    Attributes:
        spare: The share of slots and time that should be unused; None where nothing was asked.
        timelines: Whether every run gets its timeline.
    """

    folder: Path
    terms: Terms
    bootstrap: Bootstrap
    title: str
    notes: Sequence[str] = ()
    spare: float | None = None
    more: Sequence[Table] = ()
    timelines: bool = True


def report_load(runs: Sequence[LoadRun], report: LoadReport) -> tuple[list[Figures], list[Path]]:
    """Print tables, and write them with pictures, figures and timelines; returns the figures, and the files."""
    figures = [figures_of(run, report.terms, report.bootstrap, slots=run.facts.get("slots")) for run in runs]
    tables = [load_table(figures, report), waste_table(figures)]
    classes = [(run, by_class(run, report.terms, report.bootstrap)) for run in runs]
    several = any(len(own) > 1 for _, own in classes)
    if several:
        tables.append(class_table(classes))
    compared = pays(runs, report.bootstrap)
    if compared:
        tables.append(pays_table(compared, LOOPS[runs[0].loop], RATES[runs[0].loop]))
    tables += report.more
    said = sentences(figures, report)
    console = terminal.console()
    terminal.show(console, *tables)
    terminal.say(console, *said)
    parts = [part for table in tables for part in (f"## {table.title}", table, table.notes)]
    texts = {"load.md": document(*parts, said), "load.json": {"title": report.title, "runs": figures, "pays": compared}}
    written = write_texts(report.folder, texts)
    about = f"{report.title}; {LOOPS[runs[0].loop]}"
    drawn = [plot(runs, figures, report.folder / name, about, report.terms) for name, plot in PLOTS.items()]
    drawn.append(pays_plot(compared, report.folder / "pays.png", about, X[runs[0].loop]))
    written += filter(None, drawn)
    if several:
        written.append(classes_plot(classes, report.folder / "classes.png", about))
    for run in runs if report.timelines else ():
        written.append(write_timeline(run, report.folder / f"{run.method}_{run.rate:g}" / "timeline.json"))
    terminal.list_written(console, written)
    return figures, written


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


def load_table(figures: Sequence[Figures], report: LoadReport) -> Table:
    """A row per rate and method: what was asked, what users felt, and what came out."""
    limits = report.terms.limits
    notes = [
        LOOPS[figures[0].loop],
        *([f"limits: {limits}"] if limits is not None else ["no limits were given (sla.ttft, sla.tpot, sla.e2e)"]),
        "TTFT: time to first token, the queue included; TPOT: time per further token",
        "goodput: requests within all limits per second, and their share; dropped, failed and unfinished ones are not",
        f"intervals: {report.bootstrap.confidence:.0%}, over requests",
        *report.notes,
    ]
    columns: list[tuple[Column | str, Callable[[Figures], Cell | str]]] = [
        (RATES[figures[0].loop].replace(" ", "\n"), lambda found: f"{found.rate:.3g}"),
        (left("method", fold=True, min_width=10), lambda found: found.method),
        ("arrived\ndone", lambda found: f"{found.arrived}; {found.done}"),
        ("TTFT, ms\np50; p99", lambda found: _with_interval(found.ttft)),
        ("TPOT, ms\np50; p99", lambda found: _with_interval(found.tpot)),
        ("to end, ms\np50; p99", lambda found: milliseconds(found.e2e)),
        ("tokens/s\nout", lambda found: number(found.output_tokens_per_second, 1)),
        ("goodput\n/s; share", lambda found: _goodput(found.goodput)),
        ("running\nwaiting", lambda found: f"{found.running:.1f}; {found.waiting:.1f}"),
    ]
    return Table.of(
        figures, columns, title=f"Under load: {report.title}", notes=notes, section=lambda found: found.rate
    )


def waste_table(figures: Sequence[Figures]) -> Table:
    """A row per rate and method: what was dropped or done twice, and what was left over."""
    columns: list[tuple[Column | str, Callable[[Figures], Cell | str]]] = [
        (RATES[figures[0].loop].replace(" ", "\n"), lambda found: f"{found.rate:.3g}"),
        (left("method", fold=True, min_width=10), lambda found: found.method),
        ("dropped\nfailed\nunfinished", lambda found: f"{found.dropped}; {found.failed}; {found.unfinished}"),
        ("their\ntokens", lambda found: str(found.wasted.dropped_tokens)),
        ("preempted\ntokens\nagain", lambda found: f"{found.preemptions}; {found.wasted.recomputed_tokens}"),
        ("swapped\nout;\nms", lambda found: f"{found.wasted.swapped_tokens}; {1000 * found.wasted.swap_seconds:.0f}"),
        ("rejected\nnodes", lambda found: str(found.wasted.rejected_nodes)),
        ("tokens\nper\nround", lambda found: number(found.mean_acceptance_length)),
        ("found\nin cache;\ntokens", lambda found: f"{percent(found.hit_rate)}; {found.saved_tokens}"),
        ("slots\nunused", lambda found: percent(found.unused)),
        ("in engine\nexpected", lambda found: f"{found.in_engine:.2f}; {found.expected:.2f}"),
        ("gener-\nator\nlate, ms", lambda found: f"{1000 * found.late:.1f}"),
    ]
    notes = [
        LOOPS[figures[0].loop],
        "in no goodput: tokens of requests that did not end well, and those prefilled again after preemptions",
        "swapped out: tokens whose keys and values went to the host's memory, and both ways' milliseconds",
        "found in cache: the share of prompt tokens, and how many, that needed no prefill",
        "in engine: counted between turns, and expected by Little's law (arrivals per second · mean stay)",
        "late: 99th percentile of the generator's own delays; waiting for the running turn is the engine's",
    ]
    return Table.of(figures, columns, title="Beside goodput", notes=notes, section=lambda found: found.rate)


def class_table(classes: Sequence[tuple[LoadRun, Mapping[str, Figures]]]) -> Table:
    """A row per rate, method and class."""
    rows = [(run, name, found) for run, own in classes for name, found in own.items()]
    columns = [
        (RATES[rows[0][0].loop].replace(" ", "\n"), lambda each: f"{each[0].rate:.3g}"),
        (left("method", fold=True, min_width=10), lambda each: each[0].method),
        (left("class", fold=True, min_width=8), lambda each: each[1]),
        ("arrived\ndone", lambda each: f"{each[2].arrived}; {each[2].done}"),
        ("queue, ms\np50; p99", lambda each: milliseconds(each[2].queue)),
        ("TTFT, ms\np50; p99", lambda each: milliseconds(each[2].ttft)),
        ("TPOT, ms\np50; p99", lambda each: milliseconds(each[2].tpot)),
        ("within\nlimits", lambda each: percent(each[2].goodput.attainment) if each[2].goodput else NOTHING),
    ]
    notes = [LOOPS[rows[0][0].loop], "long requests delay short ones that come behind them"]
    return Table.of(rows, columns, title="By class", notes=notes, section=lambda each: (each[0].rate, each[0].method))


def origins(studies: Sequence[Study]) -> Table:
    """A row per study: where and with what it was made."""
    columns = [
        (left("folder", fold=True), lambda each: terminal.short(each.folder)),
        (left("machine"), lambda each: each.machine),
        (left("device", fold=True), lambda each: each.fact("device")),
        (left("dtype"), lambda each: each.fact("dtype")),
        (left("commit", fold=True), lambda each: commit_of(each.manifest)),
        ("runs", lambda each: str(len(each.runs))),
    ]
    return Table.of(studies, columns, title="Where runs were made")


def sentences(figures: Sequence[Figures], report: LoadReport) -> list[str]:
    """What a reader must not miss, and the highest rates that keep the limits."""
    unit = RATES[figures[0].loop]
    said = [f"{each.method} at {each.rate:.3g} {unit}: {warning}" for each in figures for warning in each.warnings]
    said += _outputs(figures)
    methods = list(dict.fromkeys(each.method for each in figures))
    if report.terms.limits is not None and len({each.rate for each in figures}) > 1:
        for share in ATTAINED:
            found = {method: knee([each for each in figures if each.method == method], share) for method in methods}
            words = [f"{method} {'none' if rate is None else f'{rate:.3g}'}" for method, rate in found.items()]
            said.append(f"highest rate up to which {share:.0%} of requests keep all limits, {unit}: {', '.join(words)}")
    for each in figures if report.spare is not None else ():
        kept = each.unused is not None and each.unused >= report.spare
        said.append(
            f"{each.method} at {each.rate:.3g}: {percent(each.unused)} of slots and time were unused, which is "
            f"{'at least' if kept else 'LESS than'} the {report.spare:.0%} to spare"
        )
    return said


def _outputs(figures: Sequence[Figures]) -> list[str]:
    """Say how many greedy outputs are those of plain decoding, and why others are not."""
    compared = [found for found in figures if found.outputs is not None]
    said = []
    for rate in dict.fromkeys(found.rate for found in compared):
        own = [each for each in compared if each.rate == rate]
        counts = ", ".join(f"{each.method} {each.outputs.equal} of {each.outputs.compared}" for each in own)
        said.append(f"greedy outputs that are plain decoding's at {rate:.3g}: {counts}")
    return said + [_apart(found) for found in compared if found.outputs.equal < found.outputs.compared]


def _apart(found: Figures) -> str:
    outputs = found.outputs
    margin = NOTHING if outputs.largest_margin is None else f"{outputs.largest_margin:.2g}"
    parts = [
        f"{outputs.near_ties} at near ties",
        *([f"{outputs.unexplained} WITHOUT such a reason"] if outputs.unexplained else []),
        *([f"{outputs.not_examined} were not looked at"] if outputs.not_examined else []),
    ]
    return (
        f"{found.method} at {found.rate:.3g}: {outputs.compared - outputs.equal} of {outputs.compared} greedy outputs "
        f"are not plain decoding's: {', '.join(parts)}; the two tokens were {margin} nats apart at most"
    )


def _with_interval(spread: Figures | None) -> Cell:
    intervals = [] if spread is None else [spread[f"p{level}_interval"] for level in (50, 99)]
    more = [f"({three_digits(1000 * low)} to {three_digits(1000 * high)})" for low, high in filter(None, intervals)]
    return Cell(milliseconds(spread), more)


def _goodput(found: Figures | None) -> str:
    return NOTHING if found is None else f"{number(found.per_second)}; {percent(found.attainment)}"


# ---------------------------------------------------------------- the timeline


def write_timeline(run: LoadRun, path: Path) -> Path:
    """Write turns, counters, and the phases of every request in Chrome's trace format, for its viewer or Perfetto."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"method": run.method, "rate": str(run.rate), "loop": f"{run.loop} loop"}
    document = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": list(_events(run))}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def _events(run: LoadRun) -> Iterator[dict[str, Any]]:
    for process, name in ((_ENGINE, f"{run.method}, {run.loop} loop"), (_REQUESTS, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    for turn in run.turns.to_dict("records"):
        begin = 1e6 * turn.pop("begin")
        seconds = turn.pop("seconds")
        parts = {"prefill": turn["prefill_tokens"], "round": turn["rows"]}
        name = " and ".join(part for part, count in parts.items() if count) or "nothing"
        yield {"ph": "X", "name": name, "pid": _ENGINE, "tid": 0, "ts": begin, "dur": 1e6 * seconds, "args": turn}
        counted = {"running": turn["running"], "waiting": turn["waiting"]}
        yield {"ph": "C", "name": "requests", "pid": _ENGINE, "ts": begin, "args": counted}
    for row in run.requests.drop(columns=["emissions", "tokens"], errors="ignore").to_dict("records"):
        for name, (since, until) in _PHASES.items():
            if row[until] == row[until] and row[since] == row[since]:
                place = {"pid": _REQUESTS, "tid": row["request"], "ts": 1e6 * row[since]}
                asked = {key: row[key] for key in ("klass", "prompt_tokens", "output_tokens", "outcome")}
                yield {"ph": "X", "name": name, "dur": 1e6 * (row[until] - row[since]), "args": asked, **place}
