"""What requests felt under load: tables over rates and methods, pictures: all from the frame of figures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.load.figures import ALL, figures_of, knee, warnings_of
from experiments.load.run import LoadRun
from experiments.load.studies import Study, check_alike, merged, remarks, terms_of, title_of
from experiments.reporting import style, terminal
from experiments.reporting.columns import percent
from experiments.reporting.formats import document, publish
from experiments.reporting.style import Panel
from experiments.reporting.table import Col, Table, words
from experiments.results.comparison import commit_of
from experiments.results.frame import Frame
from experiments.results.limits import Terms
from experiments.results.rows import Row, rows_of
from experiments.results.statistics import Bootstrap

LOOPS = {
    "open": "open loop: requests arrive whatever the engine does",
    "closed": "closed loop: a user's next request comes after the answer, which hides overload",
}
"""Stands on every table and picture."""
RATES = {"open": "requests/s arriving", "closed": "users"}


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """How runs are reported; ``spare``: the share of slots and time that should be unused, where one was asked."""

    folder: Path
    terms: Terms
    bootstrap: Bootstrap
    title: str
    notes: Sequence[str] = ()
    spare: float | None = None


def report_load(runs: Sequence[LoadRun], report: LoadReport) -> tuple[Frame, list[Path]]:
    """Print tables, and write them with pictures and figures; returns the figures, and the files."""
    frame = figures_of(runs, report.terms, report.bootstrap)
    rows = rows_of(frame, None)
    tables, said = load_tables(rows, report), sentences(runs, frame, report)
    parts = [part for table in tables for part in (f"## {table.title}", table, table.notes)]
    figures, pictures = {"title": report.title, "runs": rows}, lambda: draw(rows, report)
    texts = {"tables": tables, "document": document(*parts, said), "figures": figures, "said": said}
    return frame, publish(report.folder, "load", **texts, drawn=pictures)


def report_studies(
    studies: Sequence[Study], out: Path, *, allow_mixed: bool = False, missing: Sequence[str] = ()
) -> list[LoadRun]:
    """Print and write the tables and pictures of all runs of some studies; returns the runs as they are called there.

    Args:
        allow_mixed: Also put studies of different targets, texts, workloads or dtypes side by side, and say so.
        missing: Sentences about jobs without results, to be listed.
    """
    notes = [*check_alike(studies, allow_mixed=allow_mixed), *remarks(studies), *missing]
    for study in studies:
        made = ", ".join(map(str, (study.machine, study.fact("device"), study.fact("dtype"))))
        notes.append(f"{terminal.short(study.folder)}: {made}, commit {commit_of(study.manifest)}")
    terms, bootstrap = terms_of(studies)
    runs = merged(studies)
    report_load(runs, LoadReport(folder=out, terms=terms, bootstrap=bootstrap, title=title_of(studies), notes=notes))
    return runs


def _spread(heading: str, name: str) -> Col:
    return Col(f"{heading}, ms\np50; p99", f"{name}.p50", "3", 1e3, also=f"{name}.p99")


_FELT = [Col("arrived\ndone", "arrived", "d", also="done"), _spread("TTFT", "ttft"), _spread("TPOT", "tpot")]
_KEPT = Col("goodput\n/s", "goodput"), Col("within\nlimits", "attained", ".0%")
_RATES = [
    *(_spread("to end", "e2e"), Col("tokens/s\nout", "output_tokens_per_second", ".1f"), *_KEPT),
    Col("running\nwaiting", "running", ".1f", also="waiting"),
]
_BESIDE = [
    *(Col("dropped", "dropped", "d"), Col("failed\nunfinished", "failed", "d", also="unfinished")),
    *(Col("their\ntokens", "dropped_tokens", ".0f"), Col("rejected\nnodes", "rejected_nodes", ".0f")),
    Col("preempted\ntokens\nagain", "preemptions", ".0f", also="recomputed_tokens"),
    *(Col("tokens\nswapped", "swapped_tokens", ".0f"), Col("swap\nms", "swap_seconds", ".0f", 1e3)),
    *(Col("tokens\nper\nround", "mean_acceptance_length"), Col("found\nin cache", "hit_rate", ".0%")),
    *(Col("slots\nunused", "unused", ".0%"), Col("gener-\nator\nlate, ms", "late", ".1f", 1e3)),
]
_PAYS = [
    Col("further\ntokens", "times_tokens", ".2fx", best=True),
    Col("arrival\nto end", "times_whole", ".2fx", best=True),
    Col("tokens/s\nout", "times_throughput", ".2fx", best=True),
    Col("regret", "regret", ".1%"),
]


def load_tables(rows: Sequence[Row], report: LoadReport) -> list[Table]:
    """What users felt, what stands beside goodput, whether speculation pays, and classes where there are several."""
    loop, limits = rows[0]["loop"], report.terms.limits
    first = [Col(RATES[loop].replace(" ", "\n"), "rate", ".3g"), words("method", "method", min_width=10)]
    notes = [
        f"limits: {limits}" if limits is not None else "no limits were given (sla.ttft, sla.tpot, sla.e2e)",
        "TTFT: time to first token, the queue included; TPOT: time per further token",
        "goodput: requests within all limits per second; dropped, failed and unfinished ones are not",
        f"intervals: {report.bootstrap.confidence:.0%}, over requests",
        *report.notes,
    ]
    wasted = [
        "in no goodput: tokens of requests that did not end well, and those prefilled again after preemptions",
        "found in cache: the share of prompt tokens that needed no prefill",
        "late: 99th percentile of the generator's own delays; waiting for the running turn is the engine's",
    ]
    times = [
        "further tokens: time behind the first token, plain decoding's over the method's, total over total of the "
        "requests that both have served; bold where the interval over requests is above 1",
        "regret: the share of the oracle's speed of further tokens that is missed",
    ]
    whole = [row for row in rows if row["group"] == ALL]
    sure = [f"times_{name}" for name in ("tokens", "whole", "throughput")]
    compared = [
        row | {f"best.{name}": (row.get(f"{name}_low") or 0.0) > 1 for name in sure}
        for row in whole
        if row.get("times_throughput") is not None
    ]
    classes = [row for row in rows if row["group"] != ALL]
    by_class = [words("class", "group"), *_FELT, _spread("queue", "queue"), *_KEPT]
    shown: list[tuple[str, Sequence[Row], Sequence[Any], list[str]]] = [
        (f"Under load: {report.title}", whole, [*_FELT, *_RATES], notes),
        ("Beside goodput", whole, _BESIDE, wasted),
        ("By class", classes, by_class, ["long requests delay those behind them"]),
        ("Does it pay: as fast as plain decoding under the same load, times", compared, _PAYS, times),
    ]
    return [
        Table.of(own, [*first, *columns], title=title, notes=[LOOPS[loop], *said], section=lambda row: row["rate"])
        for title, own, columns, said in shown
        if own
    ]


def sentences(runs: Sequence[LoadRun], frame: Frame, report: LoadReport) -> list[str]:
    """What a reader must not miss, and the highest rates that keep the limits."""
    whole, unit, said = frame[frame.group == ALL], RATES[runs[0].loop], []
    for run, (_, row) in zip(runs, whole.iterrows(), strict=True):
        said += [f"{run.method} at {run.rate:.3g} {unit}: {warning}" for warning in warnings_of(run)]
        if report.spare is not None:
            kept = "at least" if row.unused >= report.spare else "LESS than"
            unused = f"{percent(row.unused)} of slots and time were unused"
            said.append(f"{run.method} at {run.rate:.3g}: {unused}, which is {kept} the {report.spare:.0%} to spare")
    if report.terms.limits is not None and whole.rate.nunique() > 1:
        for share in (0.9, 0.99):
            found = {method: knee(part, share) for method, part in whole.groupby("method", sort=False)}
            words = [f"{method} {'none' if rate is None else f'{rate:.3g}'}" for method, rate in found.items()]
            said.append(f"highest rate up to which {share:.0%} of requests keep all limits, {unit}: {', '.join(words)}")
    return said


_MS = {"scale": (1.0, 1e3), "log_y": True}
PANELS = [
    Panel(x="rate", y="ttft.p50", labels=("", "median TTFT (ms)"), **_MS),
    Panel(x="rate", y="ttft.p99", labels=("", "TTFT, p99 (ms)"), **_MS),
    Panel(x="rate", y="tpot.p99", labels=("", "TPOT, p99 (ms)"), **_MS),
    Panel(x="output_tokens_per_second", y="e2e.p50", labels=("output tokens/s", "median to the end (ms)"), **_MS),
    Panel(x="rate", y="goodput", labels=("", "within all limits (per second)")),
    Panel(x="rate", y="times_tokens", labels=("", "further tokens (times plain)"), at=1.0),
    Panel(x="rate", y="times_whole", labels=("", "arrival to end (times plain)"), at=1.0),
]
"""Those of the picture. A rate's label depends on the loop."""


def draw(rows: Sequence[Row], report: LoadReport) -> list[Path]:
    """Draw the picture; none with a single rate."""
    whole = sorted((row for row in rows if row["group"] == ALL), key=lambda row: row["rate"])
    if len({row["rate"] for row in whole}) < 2:
        return []
    loop, panels = whole[0]["loop"], []
    series = {name: [row for row in whole if row["method"] == name] for name in {row["method"]: 0 for row in rows}}
    for panel in (panel for panel in PANELS if any(row.get(panel.y) is not None for row in whole)):
        limit = getattr(report.terms.limits, panel.y.partition(".")[0], None)
        limit = None if limit is None else panel.scale[1] * limit
        panels.append(replace(panel, labels=(panel.labels[0] or RATES[loop], panel.labels[1]), limit=limit))
    about, subtitle = "Over the rate of arrivals, and latency over throughput", f"{report.title}; {LOOPS[loop]}"
    return [style.lines(report.folder / "load.png", panels, series, about=about, subtitle=subtitle)]
