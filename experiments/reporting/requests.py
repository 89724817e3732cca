"""What users felt, as a table and pictures: latencies, rates, goodput and cost of requests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.reporting import style
from experiments.reporting.cells import NOTHING, label_cell, names_of, number, percent, three_digits
from experiments.reporting.run_plots import finish
from experiments.reporting.table import Cell, Column, Table, left
from experiments.results.frame import Figures
from experiments.results.requests import LEVELS
from experiments.results.summary import MethodSummary, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "What a user feels"
CLOSED = "all requests of a batch arrive together, and the next batch when they have ended (closed loop)"
"""How the load comes about, which decides what latencies mean."""
NOT_MEASURED = "not measured"
WAITING_SHOWN = 0.1
"""Requests in the queue, as a share of those in slots, from which on a picture shows them: moments are left out."""
_MOST_COLUMNS = 4
"""Methods up to which the table has a column for each; with more it has a row."""

Known = tuple[MethodSummary, Figures]


def requests_table(summary: Summary, title: str = TITLE) -> Table | None:
    """A column per method, or a row where there are many; None if no engine told when anything happened."""
    known = _known(summary)
    if not known:
        return None
    limits = [found.goodput.limits for _, found in known if found.goodput is not None]
    told = [(method.label, method.requests) for method in summary.methods]
    silent = ", ".join(dict.fromkeys(name for name, found in told if found is not None and found.ttft is None))
    notes = [
        *warnings_of(summary),
        CLOSED,
        "TTFT: time to first token; TPOT: time per further token",
        *([f"limits: {limits[0]}"] if limits else []),
        *([f"left out, because they do not tell when tokens come: {silent}"] if silent else []),
        f"intervals: {summary.confidence:.0%}, over prompts",
    ]
    if len(known) > _MOST_COLUMNS:
        return Table.of(known, FLAT, title=title, notes=notes, section=lambda each: each[0].temperature)
    names = names_of([method for method, _ in known])
    return Table.upright([found for _, found in known], names, _LINES, title=title, notes=notes)


def warnings_of(summary: Summary) -> list[str]:
    """A sentence on each method whose timestamps cannot be right."""
    found = [(method.label, method.requests) for method in summary.methods if method.requests is not None]
    return [f"{name}: {figures.warning}" for name, figures in found if figures.warning is not None]


def _known(summary: Summary) -> list[Known]:
    """The methods whose engines told when tokens came."""
    found = [(method, method.requests) for method in summary.methods if method.requests is not None]
    return [(method, requests) for method, requests in found if requests.ttft is not None]


def milliseconds(spread: Figures | None) -> str:
    """Median and 99th percentile, with three digits that count."""
    return NOTHING if spread is None else f"{three_digits(1000 * spread.p50)}; {three_digits(1000 * spread.p99)}"


def _interval(spread: Figures | None) -> str:
    if spread is None or spread.p50_interval is None:
        return NOTHING
    return " to ".join(three_digits(1000 * end) for end in spread.p50_interval)


def _pair(first: float | None, second: float | None) -> str:
    return f"{number(first, 1)}; {number(second, 1)}"


def _shares(found: Figures) -> str:
    names = ("queue", "prefill", "decode")
    return "; ".join(percent(found.phase_shares.get(name)) for name in names) if found.phase_shares else NOTHING


def in_flight(found: Figures, digits: int = 2) -> str:
    """Requests in slots and in the queue, as averages over time."""
    known = found.concurrency
    return NOTHING if known is None else f"{known.running:.{digits}f}; {known.waiting:.{digits}f}"


def _attainment(found: Figures) -> str:
    return NOTHING if found.goodput is None else percent(found.goodput.attainment)


_LINES: list[tuple[str, Callable[[Figures], str]]] = [
    ("TTFT, ms: p50; p99", lambda f: milliseconds(f.ttft)),
    ("  interval of p50", lambda f: _interval(f.ttft)),
    ("  without the queue", lambda f: milliseconds(f.engine_ttft)),
    ("TPOT, ms: p50; p99", lambda f: milliseconds(f.tpot)),
    ("  interval of p50", lambda f: _interval(f.tpot)),
    ("gap between deliveries, ms: p50; p99", lambda f: milliseconds(f.chunk_gap)),
    ("gap between tokens, ms: p50; p99", lambda f: milliseconds(f.token_gap)),
    ("arrival to end, ms: p50; p99", lambda f: milliseconds(f.e2e)),
    ("  queue; prefill; decode, share", _shares),
    ("requests/s", lambda f: number(f.requests_per_second)),
    ("output tokens/s; with prompts", lambda f: _pair(f.output_tokens_per_second, f.total_tokens_per_second)),
    ("tokens/s of one user", lambda f: number(f.user_tokens_per_second, 1)),
    ("requests in flight; waiting", in_flight),
    ("prompts' tokens found in the cache", lambda f: percent(f.memory.hit_rate)),
    ("preemptions; tokens prefilled again", lambda f: f"{f.memory.preemptions}; {f.memory.recomputed}"),
    ("  tokens swapped back; seconds of both ways", lambda f: f"{f.memory.swapped}; {f.memory.swap_seconds:.3g}"),
    ("requests within all limits", _attainment),
    ("  goodput, requests/s", lambda f: number(f.goodput.per_second) if f.goodput else NOTHING),
    ("device hours per million tokens", lambda f: number(f.device_hours_per_million_tokens, 3)),
    ("price of a million tokens", lambda f: number(f.price_per_million_tokens)),
    ("energy per token, J", lambda f: f"{f.joules_per_token:.3g}" if f.joules_per_token is not None else NOT_MEASURED),
]
"""The rows of the table with a column per method."""
FLAT: list[tuple[Column | str, Callable[[Known], Cell | str]]] = [
    ("T", lambda each: f"{each[0].temperature:g}"),
    (left("method", fold=True, min_width=16), lambda each: label_cell(each[0])),
    ("TTFT, ms\np50; p99", lambda each: milliseconds(each[1].ttft)),
    ("TPOT, ms\np50; p99", lambda each: milliseconds(each[1].tpot)),
    ("to end, ms\np50; p99", lambda each: milliseconds(each[1].e2e)),
    ("requests\n/s", lambda each: number(each[1].requests_per_second)),
    ("tokens/s\nall; one user", lambda each: _pair(each[1].output_tokens_per_second, each[1].user_tokens_per_second)),
    ("within\nlimits", lambda each: _attainment(each[1])),
    ("price of\n1M tokens", lambda each: number(each[1].price_per_million_tokens)),
]


@style.styled()
def requests_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Draw the percentiles of three latencies, a line per method; returns None if nothing is known of any."""
    known = _known(summary)
    if not known:
        return None
    figure = style.new_figure(style.PAGE, 1.35 + 0.26 * len(known))
    panels = figure.subplots(1, 3, sharey=True)
    texts = {"ttft": "time to first token (ms)", "tpot": "time per further token (ms)", "e2e": "arrival to end (ms)"}
    for axes, (field, text) in zip(panels, texts.items(), strict=True):
        _panel(axes, [getattr(found, field) for _, found in known])
        axes.set_xlabel(text)
    style.name_rows(panels[0], names_of([method for method, _ in known]), 26)
    style.legend(figure, *panels[0].get_legend_handles_labels(), ncols=5)
    return finish(figure, path, f"{TITLE}: percentiles over requests; {CLOSED}", subtitle, summary)


@style.styled()
def in_flight_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Draw how many requests were in slots and in the queue over a run's time; returns None if that is not known."""
    known = [(method, method.requests.concurrency) for method in summary.methods if method.requests is not None]
    known = [(method, found) for method, found in known if found is not None and found.running_over_time]
    if not known:
        return None
    figure = style.new_figure(style.PAGE, 2.4)
    axes = figure.subplots()
    for index, ((_, found), name) in enumerate(zip(known, names_of([method for method, _ in known]), strict=True)):
        parts, color = len(found.running_over_time), style.color(index)
        edges = [found.seconds * part / parts for part in range(parts + 1)]
        axes.stairs(found.running_over_time, edges, color=color, label=style.wrapped(name, 26))
        if max(found.waiting_over_time) > WAITING_SHOWN * max(found.running_over_time):
            waiting = style.wrapped(f"{name}: waiting", 26)
            axes.stairs(found.waiting_over_time, edges, label=waiting, color=color, linestyle="dotted")
    axes.set(xlabel="seconds of the method's own calls, one after another", ylabel="requests in flight")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.grid(False)
    style.legend(figure, *axes.get_legend_handles_labels(), ncols=4)
    return finish(figure, path, f"Requests in flight over time; {CLOSED}", subtitle, summary)


def _panel(axes: "Axes", spreads: Sequence[Figures | None]) -> None:
    from matplotlib.ticker import MaxNLocator

    for row, spread in enumerate(spreads):
        if spread is None:
            continue
        values = [1000 * getattr(spread, f"p{level}") for level in LEVELS]
        axes.hlines(row, values[0], values[-1], color=style.color(0), linewidth=1.3)
        for index, (level, value) in enumerate(zip(LEVELS, values, strict=True)):
            axes.plot([value], [row], label=f"p{level}", linestyle="none", **style.looks(index))
        if spread.p50_interval is not None:
            low, high = (1000 * end for end in spread.p50_interval)
            axes.hlines(row + 0.22, low, high, color=style.FAINT, linewidth=1.0, label="interval of p50")
    axes.set_xlim(0, 1.06 * axes.get_xlim()[1])
    axes.xaxis.set_major_locator(MaxNLocator(5))
