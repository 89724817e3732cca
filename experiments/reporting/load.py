"""What requests felt under load: tables over rates and methods, pictures, timelines; all from the frame of figures."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from experiments.load.figures import ALL, figures_of, knee, warnings_of
from experiments.load.run import Frame, LoadRun
from experiments.load.studies import Study, check_alike, merged, remarks, terms_of, title_of
from experiments.reporting import style, terminal
from experiments.reporting.columns import NOTHING, number, percent, three_digits
from experiments.reporting.formats import document, write_texts
from experiments.reporting.table import Cell, Column, Emphasis, Table, left
from experiments.results.comparison import commit_of
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

Row = Mapping[str, Any]
Columns = Sequence[tuple[Column | str, Callable[[Row], Cell | str]]]


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


def report_load(runs: Sequence[LoadRun], report: LoadReport) -> tuple[Frame, list[Path]]:
    """Print tables, and write them with pictures, figures and timelines; returns the figures, and the files."""
    frame = figures_of(runs, report.terms, report.bootstrap)
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    tables = [*load_tables(rows, report), *report.more]
    said = sentences(runs, frame, report)
    console = terminal.console()
    terminal.show(console, *tables)
    terminal.say(console, *said)
    parts = [part for table in tables for part in (f"## {table.title}", table, table.notes)]
    written = write_texts(
        report.folder, {"load.md": document(*parts, said), "load.json": {"title": report.title, "runs": rows}}
    )
    written += draw(frame, report)
    for run in runs if report.timelines else ():
        written.append(write_timeline(run, report.folder / f"{run.method}_{run.rate:g}" / "timeline.json"))
    terminal.list_written(console, written)
    return frame, written


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
    columns = [
        (left("folder", fold=True), lambda study: terminal.short(study.folder)),
        (left("machine"), lambda study: study.machine),
        (left("device", fold=True), lambda study: study.fact("device")),
        (left("dtype"), lambda study: study.fact("dtype")),
        (left("commit", fold=True), lambda study: commit_of(study.manifest)),
        ("runs", lambda study: str(len(study.runs))),
    ]
    more = [Table.of(studies, columns, title="Where runs were made")]
    about = {"title": title_of(studies), "notes": notes, "more": more, "timelines": False}
    report_load(runs, LoadReport(folder=out, terms=terms, bootstrap=bootstrap, **about))
    return runs


# ---------------------------------------------------------------- tables


def load_tables(rows: Sequence[Row], report: LoadReport) -> list[Table]:
    """What users felt, what stands beside goodput, whether speculation pays, and classes where there are several."""
    loop = rows[0]["loop"]
    limits = report.terms.limits
    first: Columns = [
        (RATES[loop].replace(" ", "\n"), lambda row: f"{row['rate']:.3g}"),
        (left("method", fold=True, min_width=10), lambda row: row["method"]),
    ]
    felt: Columns = [
        ("arrived\ndone", lambda row: f"{row['arrived']}; {row['done']}"),
        ("TTFT, ms\np50; p99", lambda row: _spread(row, "ttft")),
        ("TPOT, ms\np50; p99", lambda row: _spread(row, "tpot")),
    ]
    kept = ("goodput\n/s; share", lambda row: f"{number(row.get('goodput'))}; {percent(row.get('attained'))}")
    rates: Columns = [
        ("to end, ms\np50; p99", lambda row: _milliseconds(row, "e2e")),
        ("tokens/s\nout", lambda row: number(row["output_tokens_per_second"], 1)),
        kept,
        ("running\nwaiting", lambda row: f"{row['running']:.1f}; {row['waiting']:.1f}"),
    ]
    beside: Columns = [
        ("dropped\nfailed\nunfinished", lambda row: f"{row['dropped']}; {row['failed']}; {row['unfinished']}"),
        ("their\ntokens", lambda row: f"{row['dropped_tokens']:.0f}"),
        ("preempted\ntokens\nagain", lambda row: f"{row['preemptions']:.0f}; {row['recomputed_tokens']:.0f}"),
        ("swapped\nout;\nms", lambda row: f"{row['swapped_tokens']:.0f}; {1000 * row['swap_seconds']:.0f}"),
        ("rejected\nnodes", lambda row: f"{row['rejected_nodes']:.0f}"),
        ("tokens\nper\nround", lambda row: number(row["mean_acceptance_length"])),
        ("found\nin cache;\ntokens", lambda row: f"{percent(row['hit_rate'])}; {row['saved_tokens']:.0f}"),
        ("slots\nunused", lambda row: percent(row["unused"])),
        ("in engine\nexpected", lambda row: f"{row['in_engine']:.2f}; {row['expected']:.2f}"),
        ("gener-\nator\nlate, ms", lambda row: f"{1000 * row['late']:.1f}"),
    ]
    pays: Columns = [
        ("further\ntokens", lambda row: _times(row, "times_tokens")),
        ("arrival\nto end", lambda row: _times(row, "times_whole")),
        ("tokens/s\nout", lambda row: f"{row['times_throughput']:.2f}x"),
        ("regret", lambda row: NOTHING if row.get("regret") is None else f"{row['regret']:.1%}"),
    ]
    notes = [
        LOOPS[loop],
        f"limits: {limits}" if limits is not None else "no limits were given (sla.ttft, sla.tpot, sla.e2e)",
        "TTFT: time to first token, the queue included; TPOT: time per further token",
        "goodput: requests within all limits per second, and their share; dropped, failed and unfinished ones are not",
        f"intervals: {report.bootstrap.confidence:.0%}, over requests",
    ]
    wasted = [
        LOOPS[loop],
        "in no goodput: tokens of requests that did not end well, and those prefilled again after preemptions",
        "swapped out: tokens whose keys and values went to the host's memory, and both ways' milliseconds",
        "found in cache: the share of prompt tokens, and how many, that needed no prefill",
        "in engine: counted between turns, and expected by Little's law (arrivals per second · mean stay)",
        "late: 99th percentile of the generator's own delays; waiting for the running turn is the engine's",
    ]
    times = [
        LOOPS[loop],
        "further tokens: time behind the first token, plain decoding's over the method's, total over total of the "
        "requests that both have served; in parentheses the interval over requests, bold where it is above 1",
        "regret: the share of the oracle's speed of further tokens that is missed",
    ]
    whole = [row for row in rows if row["group"] == ALL]
    compared = [row for row in whole if row.get("times_throughput") is not None]
    classes = [row for row in rows if row["group"] != ALL]
    group = (left("class", fold=True, min_width=8), lambda row: row["group"])
    queue = ("queue, ms\np50; p99", lambda row: _milliseconds(row, "queue"))
    shown: list[tuple[str, Sequence[Row], Columns, list[str]]] = [
        (f"Under load: {report.title}", whole, [*felt, *rates], [*notes, *report.notes]),
        ("Beside goodput", whole, beside, wasted),
        ("By class", classes, [group, *felt, queue, kept], [LOOPS[loop], "long requests delay those behind them"]),
        ("Does it pay: as fast as plain decoding under the same load, times", compared, pays, times),
    ]
    return [
        Table.of(own, [*first, *columns], title=title, notes=said, section=lambda row: row["rate"])
        for title, own, columns, said in shown
        if own
    ]


def _milliseconds(row: Row, name: str) -> str:
    ends: list[Any] = [row.get(f"{name}.p{level}") for level in (50, 99)]
    return "; ".join(three_digits(None if end is None else 1000 * end) for end in ends)


def _spread(row: Row, name: str) -> Cell:
    bounds: list[Any] = [(row.get(f"{name}.p{level}_low"), row.get(f"{name}.p{level}_high")) for level in (50, 99)]
    more = [f"({three_digits(1000 * low)} to {three_digits(1000 * high)})" for low, high in bounds if low is not None]
    return Cell(_milliseconds(row, name), more)


def _times(row: Row, name: str) -> Cell:
    value, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    if value is None or low is None:
        return Cell(NOTHING if value is None else f"{value:.2f}x")
    emphasis = Emphasis.BEST if low > 1 else Emphasis.NONE
    return Cell(f"{value:.2f}x", [f"({low:.2f} to {high:.2f})"], emphasis=emphasis)


def sentences(runs: Sequence[LoadRun], frame: Frame, report: LoadReport) -> list[str]:
    """What a reader must not miss, and the highest rates that keep the limits."""
    whole = frame[frame.group == ALL]
    unit = RATES[runs[0].loop]
    said = []
    for run, (_, row) in zip(runs, whole.iterrows(), strict=True):
        said += [f"{run.method} at {run.rate:.3g} {unit}: {warning}" for warning in warnings_of(run, row)]
        if report.spare is not None:
            kept = "at least" if row.unused >= report.spare else "LESS than"
            unused = NOTHING if row.unused is None else percent(row.unused)
            said.append(
                f"{run.method} at {run.rate:.3g}: {unused} of slots and time were unused, which is {kept} the "
                f"{report.spare:.0%} to spare"
            )
    if report.terms.limits is not None and whole.rate.nunique() > 1:
        for share in ATTAINED:
            found = {method: knee(part, share) for method, part in whole.groupby("method", sort=False)}
            words = [f"{method} {'none' if rate is None else f'{rate:.3g}'}" for method, rate in found.items()]
            said.append(f"highest rate up to which {share:.0%} of requests keep all limits, {unit}: {', '.join(words)}")
    return said


# ---------------------------------------------------------------- pictures


class Panel(NamedTuple):
    """A line per method of ``y`` over ``x``, ``y`` times ``scale``, with a line at a limit if there is one."""

    x: str
    y: str
    label: str
    scale: float = 1.0
    limit: str = ""


PICTURES: dict[str, tuple[str, list[Panel]]] = {
    "load.png": (
        "Over the rate of arrivals, with intervals over requests",
        [
            Panel("rate", "ttft.p50", "median TTFT (ms)", 1000, "ttft"),
            Panel("rate", "ttft.p99", "TTFT, p99 (ms)", 1000, "ttft"),
            Panel("rate", "tpot.p99", "TPOT, p99 (ms)", 1000, "tpot"),
            Panel("rate", "goodput", "within all limits (per second)"),
            Panel("rate", "times_tokens", "further tokens (times plain)"),
            Panel("rate", "times_whole", "arrival to end (times plain)"),
        ],
    ),
    "knee.png": (
        "Median latency over throughput",
        [
            Panel("output_tokens_per_second", "ttft.p50", "median TTFT (ms)", 1000, "ttft"),
            Panel("output_tokens_per_second", "e2e.p50", "median from arrival to end (ms)", 1000, "e2e"),
        ],
    ),
}


def draw(frame: Frame, report: LoadReport) -> list[Path]:
    """Draw the pictures; none with a single rate."""
    whole = frame[frame.group == ALL]
    if whole.rate.nunique() < 2:
        return []
    return [_draw(whole, report, name, title, panels) for name, (title, panels) in PICTURES.items()]


@style.styled()
def _draw(frame: Frame, report: LoadReport, name: str, title: str, panels: Sequence[Panel]) -> Path:
    panels = [panel for panel in panels if panel.y in frame and frame[panel.y].notna().any()]
    lines = -(-len(panels) // 3)
    figure = style.new_figure(style.PAGE, 0.8 + 2.2 * lines)
    drawn = figure.subplots(lines, -(-len(panels) // lines), squeeze=False).ravel()
    loop = frame.loop.iloc[0]
    for axes, panel in zip(drawn, panels, strict=False):
        for index, (method, part) in enumerate(frame.groupby("method", sort=False)):
            known = part[part[panel.y].notna()].sort_values("rate")
            low, high = (known.get(f"{panel.y}_{end}") for end in ("low", "high"))
            bounds = [None] * len(known) if low is None or high is None else list(zip(low, high, strict=True))
            style.curve(
                axes, list(zip(known[panel.x], known[panel.y], bounds, strict=True)), index, method, scale=panel.scale
            )
        limit = getattr(report.terms.limits, panel.limit, None) if panel.limit else None
        at = panel.scale * limit if limit is not None else 1.0 if panel.y.startswith("times_") else None
        if at is not None:
            axes.axhline(at, color=style.FAINT if limit is None else style.WRONG, linewidth=1.0, linestyle="--")
        if panel.scale != 1.0:
            style.plain_log(axes.yaxis)
        x = "output tokens per second" if panel.x != "rate" else RATES[loop]
        axes.set(xlabel=x, ylabel=panel.label)
    for axes in drawn[len(panels) :]:
        axes.set_visible(False)
    style.legend_of(figure, drawn[0])
    return style.finish(figure, report.folder / name, title, f"{report.title}; {LOOPS[loop]}")


# ---------------------------------------------------------------- the timeline


def write_timeline(run: LoadRun, path: Path) -> Path:
    """Write turns, counters, and the phases of every request in Chrome's trace format, for its viewer or Perfetto."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"method": run.method, "rate": str(run.rate), "loop": f"{run.loop} loop"}
    path.write_text(
        json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": list(_events(run))}), encoding="utf-8"
    )
    return path


def _events(run: LoadRun) -> Iterator[dict[str, Any]]:
    for process, name in ((_ENGINE, f"{run.method}, {run.loop} loop"), (_REQUESTS, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    for turn in run.turns.to_dict("records"):
        begin, seconds = 1e6 * turn.pop("begin"), turn.pop("seconds")
        parts = {"prefill": turn["prefill_tokens"], "round": turn["rows"]}
        name = " and ".join(part for part, count in parts.items() if count) or "nothing"
        yield {"ph": "X", "name": name, "pid": _ENGINE, "tid": 0, "ts": begin, "dur": 1e6 * seconds, "args": turn}
        counted = {"running": turn["running"], "waiting": turn["waiting"]}
        yield {"ph": "C", "name": "requests", "pid": _ENGINE, "ts": begin, "args": counted}
    for row in run.requests.to_dict("records"):
        for name, (since, until) in _PHASES.items():
            if row[until] == row[until] and row[since] == row[since]:
                place = {"pid": _REQUESTS, "tid": row["request"], "ts": 1e6 * row[since]}
                asked = {key: row[key] for key in ("klass", "prompt_tokens", "output_tokens", "outcome")}
                yield {"ph": "X", "name": name, "dur": 1e6 * (row[until] - row[since]), "args": asked, **place}
