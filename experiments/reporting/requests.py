"""What users felt, as a table and a picture: latencies, rates, goodput and cost of requests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from experiments.reporting import style
from experiments.reporting.cells import NOTHING, lossiness, number, percent
from experiments.reporting.run_plots import plot_title
from experiments.reporting.table import Cell, Column, Table
from experiments.results.requests import LEVELS, RequestFigures, Spread
from experiments.results.summary import MethodSummary, Summary

TITLE = "What a user feels"
CLOSED = "all requests of a batch arrive together, and the next batch when they have ended (closed loop)"
"""How the load comes about, which decides what latencies mean."""
NOT_MEASURED = "not measured"
WAITING_SHOWN = 0.1
"""Requests in the queue, as a share of those in slots, from which on a picture shows them: moments are left out."""
_MOST_COLUMNS = 4
"""Methods up to which the table has a column for each; with more it has a row."""

Figure = Callable[[RequestFigures], str]


def requests_table(summary: Summary, title: str = TITLE) -> Table | None:
    """Returns the table; None if no engine told when anything happened.

    Args:
        summary: All figures of the run.
        title: The title.
    """
    known = [(method, method.requests) for method in summary.methods if method.requests is not None]
    known = [(method, found) for method, found in known if found.ttft is not None]
    if not known:
        return None
    make = _upright if len(known) <= _MOST_COLUMNS else _flat
    return make(known, title, _notes(summary, [found for _, found in known]))


def warnings_of(summary: Summary) -> list[str]:
    """Returns a sentence on each method whose timestamps cannot be right."""
    found = [(method.label, method.requests) for method in summary.methods if method.requests is not None]
    return [f"{name}: {figures.warning}" for name, figures in found if figures.warning is not None]


def _upright(known: Sequence[tuple[MethodSummary, RequestFigures]], title: str, notes: Sequence[str]) -> Table:
    """A row per figure, a column per method."""
    temperatures = {method.temperature for method, _ in known}
    names = [m.label + (f", T={m.temperature:g}" if len(temperatures) > 1 else "") for m, _ in known]
    table = Table([Column("", "left"), *map(Column, names)], title, notes)
    figures = [found for _, found in known]
    for name, cell in _rows(figures):
        table.add(name, *map(cell, figures))
    return table


def _rows(figures: Sequence[RequestFigures]) -> list[tuple[str, Figure]]:
    """Names and cells of the rows; what nobody asked for is left out."""
    rows: list[tuple[str, Figure]] = [
        ("TTFT, ms: p50; p99", lambda f: _milliseconds(f.ttft)),
        ("  interval of p50", lambda f: _interval(f.ttft)),
        ("  without the queue", lambda f: _milliseconds(f.engine_ttft)),
        ("TPOT, ms: p50; p99", lambda f: _milliseconds(f.tpot)),
        ("  interval of p50", lambda f: _interval(f.tpot)),
        ("gap between deliveries, ms: p50; p99", lambda f: _milliseconds(f.chunk_gap)),
        ("gap between tokens, ms: p50; p99", lambda f: _milliseconds(f.token_gap)),
        ("arrival to end, ms: p50; p99", lambda f: _milliseconds(f.e2e)),
        ("  queue; prefill; decode, share", lambda f: _shares(f.phase_shares, ("queue", "prefill", "decode"))),
        ("requests/s", lambda f: number(f.requests_per_second)),
        ("output tokens/s; with prompts", lambda f: _pair(f.output_tokens_per_second, f.total_tokens_per_second)),
        ("tokens/s of one user", lambda f: number(f.user_tokens_per_second, 1)),
        ("requests in flight; waiting", _in_flight),
    ]
    if any(found.goodput is not None for found in figures):
        rows.append(("requests within all limits", lambda f: percent(f.goodput.attainment) if f.goodput else NOTHING))
        rows.append(("  goodput, requests/s", lambda f: number(f.goodput.per_second) if f.goodput else NOTHING))
    rows.append(("device hours per million tokens", lambda f: number(f.device_hours_per_million_tokens, 3)))
    if any(found.price_per_million_tokens is not None for found in figures):
        rows.append(("price of a million tokens", lambda f: number(f.price_per_million_tokens)))
    energy: Figure = lambda f: NOT_MEASURED if f.joules_per_token is None else f"{f.joules_per_token:.3g}"  # noqa: E731
    rows.append(("energy per token, J", energy))
    return rows


FLAT_COLUMNS = (
    Column("T"),
    Column("method", "left", fold=True, min_width=16),
    Column("TTFT, ms\np50; p99"),
    Column("TPOT, ms\np50; p99"),
    Column("to end, ms\np50; p99"),
    Column("requests\n/s"),
    Column("tokens/s\nall; one user"),
    Column("within\nlimits"),
    Column("price of\n1M tokens"),
)


def _flat(known: Sequence[tuple[MethodSummary, RequestFigures]], title: str, notes: Sequence[str]) -> Table:
    """A row per method."""
    table = Table(FLAT_COLUMNS, title, notes)
    for index, (method, found) in enumerate(known):
        table.add(
            f"{method.temperature:g}",
            Cell(method.label, emphasis=lossiness(method.exactness)),
            _milliseconds(found.ttft),
            _milliseconds(found.tpot),
            _milliseconds(found.e2e),
            number(found.requests_per_second),
            _pair(found.output_tokens_per_second, found.user_tokens_per_second),
            NOTHING if found.goodput is None else percent(found.goodput.attainment),
            number(found.price_per_million_tokens),
            end_section=index + 1 == len(known) or known[index + 1][0].temperature != method.temperature,
        )
    return table


def _notes(summary: Summary, figures: Sequence[RequestFigures]) -> list[str]:
    limits = [found.goodput.limits for found in figures if found.goodput is not None]
    known = [(method.label, method.requests) for method in summary.methods]
    silent = ", ".join(dict.fromkeys(name for name, found in known if found is not None and found.ttft is None))
    return [
        *warnings_of(summary),
        CLOSED,
        "TTFT: time to first token; TPOT: time per further token",
        *([f"limits: {limits[0]}"] if limits else []),
        *([f"left out, because they do not tell when tokens come: {silent}"] if silent else []),
        f"intervals: {summary.confidence:.0%}, over prompts",
    ]


def _milliseconds(spread: Spread | None) -> str:
    return NOTHING if spread is None else f"{_digits(spread.p50)}; {_digits(spread.p99)}"


def _interval(spread: Spread | None) -> str:
    if spread is None or spread.p50_interval is None:
        return NOTHING
    return " to ".join(map(_digits, spread.p50_interval))


def _digits(seconds: float) -> str:
    """Milliseconds with three digits that count."""
    value = 1000 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _pair(first: float | None, second: float | None) -> str:
    return f"{number(first, 1)}; {number(second, 1)}"


def _shares(shares: dict[str, float], names: Sequence[str]) -> str:
    return "; ".join(percent(shares.get(name)) for name in names) if shares else NOTHING


def _in_flight(found: RequestFigures) -> str:
    if found.concurrency is None:
        return NOTHING
    return f"{found.concurrency.running:.2f}; {found.concurrency.waiting:.2f}"


@style.styled()
def requests_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Draw the percentiles of three latencies, a line per method; returns None if nothing is known of any."""
    known = [(method, method.requests) for method in summary.methods if method.requests is not None]
    known = [(method, found) for method, found in known if found.ttft is not None]
    if not known:
        return None
    several = len({method.temperature for method, _ in known}) > 1
    names = [method.label + (f", T={method.temperature:g}" if several else "") for method, _ in known]
    figure = style.new_figure(style.PAGE, 1.35 + 0.26 * len(known))
    panels = figure.subplots(1, 3, sharey=True)
    for axes, text, spreads in (
        (panels[0], "time to first token (ms)", [found.ttft for _, found in known]),
        (panels[1], "time per further token (ms)", [found.tpot for _, found in known]),
        (panels[2], "arrival to end (ms)", [found.e2e for _, found in known]),
    ):
        _panel(axes, spreads)
        axes.set_xlabel(text)
    panels[0].set_yticks(range(len(known)), [style.wrapped(name, 26) for name in names])
    panels[0].set_ylim(len(known) - 0.5, -0.5)
    handles, labels = panels[0].get_legend_handles_labels()
    listed = dict(zip(labels, handles, strict=True))  # each once: every line of the panel has them
    style.legend(figure, list(listed.values()), list(listed), ncols=5)
    plot_title(figure, f"{TITLE}: percentiles over requests; {CLOSED}", subtitle, summary)
    return style.save(figure, path)


@style.styled()
def in_flight_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Draw how many requests were in slots and in the queue over a run's time; returns None if that is not known."""
    known = [(method, method.requests.concurrency) for method in summary.methods if method.requests is not None]
    known = [(method, found) for method, found in known if found is not None and found.running_over_time]
    if not known:
        return None
    several = len({method.temperature for method, _ in known}) > 1
    figure = style.new_figure(style.PAGE, 2.4)
    axes = figure.subplots()
    for index, (method, found) in enumerate(known):
        parts = len(found.running_over_time)
        edges = [found.seconds * part / parts for part in range(parts + 1)]
        name = method.label + (f", T={method.temperature:g}" if several else "")
        axes.stairs(found.running_over_time, edges, color=style.color(index), label=style.wrapped(name, 26))
        if max(found.waiting_over_time) > WAITING_SHOWN * max(found.running_over_time):
            looks: dict[str, Any] = {"color": style.color(index), "linestyle": "dotted"}
            axes.stairs(found.waiting_over_time, edges, label=style.wrapped(f"{name}: waiting", 26), **looks)
    axes.set_xlabel("seconds of the method's own calls, one after another")
    axes.set_ylabel("requests in flight")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    style.legend(figure, *axes.get_legend_handles_labels(), ncols=4)
    plot_title(figure, f"Requests in flight over time; {CLOSED}", subtitle, summary)
    return style.save(figure, path)


def _panel(axes: Axes, spreads: Sequence[Spread | None]) -> None:
    for row, spread in enumerate(spreads):
        if spread is None:
            continue
        values = [1000 * getattr(spread, f"p{level}") for level in LEVELS]
        axes.hlines(row, values[0], values[-1], color=style.color(0), linewidth=1.3)
        for index, (level, value) in enumerate(zip(LEVELS, values, strict=True)):
            looks: dict[str, Any] = {"color": style.color(index), "marker": style.marker(index), "linestyle": "none"}
            axes.plot([value], [row], label=f"p{level}", **looks)
        if spread.p50_interval is not None:
            low, high = (1000 * end for end in spread.p50_interval)
            axes.hlines(row + 0.22, low, high, color=style.FAINT, linewidth=1.0, label="interval of p50")
    axes.set_xlim(0, 1.06 * axes.get_xlim()[1])
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="x")
