"""Whether speculation pays under load: every method against plain decoding, and against the oracle, request by request.

All play the same requests at the same moments, so they are compared in pairs: a table, and a picture over rates.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.load.figures import latencies
from experiments.load.run import DONE, LoadRun
from experiments.reporting import style
from experiments.reporting.columns import NOTHING
from experiments.reporting.table import Cell, Emphasis, Table, left
from experiments.results.frame import Figures
from experiments.results.records import PLAIN
from experiments.results.statistics import Bootstrap, ratio_of_sums

ORACLE = "OracleLength"
"""The policy that others are compared with (``LoadRun.facts``)."""
SPANS = {"tokens": ("first_token", "finished"), "whole": ("arrived", "finished")}
"""The spans of a request's life that are compared: its tokens behind the first one, and all of it."""


def pays(runs: Sequence[LoadRun], bootstrap: Bootstrap) -> list[Figures]:
    """Return a row per rate and method beside plain decoding; none where that was not played.

    Returns:
        ``method``, ``rate``; ``tokens`` and ``whole``, how many times as fast as plain decoding those spans are, total
        over total of the requests that both have served, with ``..._interval`` over requests; ``throughput``, of output
        tokens per second; ``regret``, the share of the oracle's speed of tokens that is missed, None without one.
    """
    played: dict[tuple[float, str | None], dict[str, LoadRun]] = {}
    for run in runs:
        place = (run.rate, run.facts.get("study"))  # where studies are merged, beside plain decoding of the same one
        played.setdefault(place, {})[run.facts.get("called", run.method)] = run
    found = []
    for (rate, _), own in played.items():
        oracle = next((run for run in own.values() if run.facts.get("policy") == ORACLE), None)
        for name, run in own.items() if PLAIN in own else ():
            if name == PLAIN:
                continue
            speeds = _speeds(run, own[PLAIN], bootstrap)
            best = None if oracle is None else _speeds(run, oracle, None)["tokens"]
            rates = [_tokens(each) / each.seconds for each in (run, own[PLAIN])]
            regret = None if best is None else 1 - best
            found.append(Figures(method=run.method, rate=rate, **speeds, throughput=rates[0] / rates[1], regret=regret))
    return found


def _tokens(run: LoadRun) -> int:
    return int(run.requests.output_tokens[run.requests.outcome == DONE].sum())


def _speeds(run: LoadRun, other: LoadRun, bootstrap: Bootstrap | None) -> dict[str, Any]:
    """Return how many times as fast a run is as another one."""
    both = latencies(run).merge(latencies(other), on="request", suffixes=("", "_other"))
    both = both[(both.outcome == DONE) & (both.outcome_other == DONE)]
    found: dict[str, Any] = {}
    for name, (begin, end) in SPANS.items():
        spans = [(both[end + which] - both[begin + which]).to_numpy() for which in ("_other", "")]
        known = bool(len(both)) and spans[1].sum() > 0
        found[name] = float(np.asarray(ratio_of_sums(*spans))) if known else None
        if bootstrap is not None:
            found[f"{name}_interval"] = bootstrap.interval(ratio_of_sums, spans) if known else None
    return found


def pays_table(rows: Sequence[Figures], loop: str, rates: str) -> Table:
    """A row per rate and method: how many times as fast as plain decoding under the same load."""
    has_oracle = any(row.regret is not None for row in rows)

    def times(row: Figures, name: str) -> Cell:
        value, interval = row[name], row[f"{name}_interval"]
        if value is None:
            return Cell(NOTHING)
        more = [] if interval is None else [f"({interval[0]:.2f} to {interval[1]:.2f})"]
        wins = interval is not None and interval[0] > 1
        return Cell(f"{value:.2f}x", more, emphasis=Emphasis.BEST if wins else Emphasis.NONE)

    columns = [
        (rates.replace(" ", "\n"), lambda row: f"{row.rate:.3g}"),
        (left("method", fold=True, min_width=10), lambda row: row.method),
        ("further\ntokens", lambda row: times(row, "tokens")),
        ("arrival\nto end", lambda row: times(row, "whole")),
        ("tokens/s\nout", lambda row: f"{row.throughput:.2f}x"),
    ]
    if has_oracle:
        columns.append(("regret", lambda row: NOTHING if row.regret is None else f"{100 * row.regret:.1f} %"))
    notes = [
        loop,
        "further tokens: time behind the first token, plain decoding's over the method's, total over total of the "
        "requests that both have served; in parentheses the interval over requests, bold where it is above 1",
        *(["regret: the share of the oracle's speed of further tokens that is missed"] if has_oracle else []),
    ]
    return Table.of(
        rows, columns, title="Does it pay: as fast as plain decoding under the same load, times", notes=notes,
        section=lambda row: row.rate,
    )  # fmt: skip


@style.styled()
def pays_plot(rows: Sequence[Figures], path: Path, subtitle: str, x: str) -> Path | None:
    """Draw how much faster than plain decoding the methods are over rates; None with a single rate."""
    methods = list(dict.fromkeys(row.method for row in rows))
    if len({row.rate for row in rows}) < 2:
        return None
    figure = style.new_figure(style.PAGE, 3.0)
    panels = figure.subplots(1, 2, sharex=True)
    texts = {"tokens": "further tokens (times plain)", "whole": "arrival to end (times plain)"}
    for axes, (name, text) in zip(panels, texts.items(), strict=True):
        for index, method in enumerate(methods):
            own = sorted((row for row in rows if row.method == method and row[name]), key=lambda row: row.rate)
            style.curve(axes, [(row.rate, row[name], row[f"{name}_interval"]) for row in own], index, method)
        axes.axhline(1.0, color="black", linewidth=0.8)
        low, high = axes.get_ylim()
        axes.axhspan(min(low, 0.95), 1.0, color="grey", alpha=0.15, linewidth=0)
        axes.set_ylim(min(low, 0.95), max(high, 1.05))
        axes.set(xlabel=x, ylabel=text)
        if max(row.rate for row in rows) > 8 * min(row.rate for row in rows):
            style.plain_log(axes.xaxis)
    style.legend_of(figure, panels[0], ncols=min(4, len(methods)))
    return style.finish(
        figure, path, "Above the line speculation is faster than plain decoding under the same load", subtitle
    )
