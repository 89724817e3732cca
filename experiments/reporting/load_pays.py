"""Whether speculation pays under load, as a table and a picture over rates."""

from collections.abc import Sequence
from pathlib import Path

from experiments.reporting import style
from experiments.reporting.cells import NOTHING
from experiments.reporting.table import Cell, Emphasis, Table, left
from experiments.results.frame import Figures


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
    for axes, name, text in zip(
        panels,
        ("tokens", "whole"),
        ("further tokens (times plain)", "arrival to end (times plain)"),
        strict=True,
    ):
        for index, method in enumerate(methods):
            own = sorted((row for row in rows if row.method == method and row[name]), key=lambda row: row.rate)
            rates = [row.rate for row in own]
            axes.plot(rates, [row[name] for row in own], label=method, **style.looks(index))
            known = [row for row in own if row[f"{name}_interval"] is not None]
            ends = [row[f"{name}_interval"] for row in known]
            axes.vlines(
                [row.rate for row in known], [low for low, _ in ends], [high for _, high in ends],
                color=style.color(index), linewidth=1.0,
            )  # fmt: skip
        axes.axhline(1.0, color="black", linewidth=0.8)
        low, high = axes.get_ylim()
        axes.axhspan(min(low, 0.95), 1.0, color="grey", alpha=0.15, linewidth=0)
        axes.set_ylim(min(low, 0.95), max(high, 1.05))
        axes.set(xlabel=x, ylabel=text)
        if max(row.rate for row in rows) > 8 * min(row.rate for row in rows):
            axes.set_xscale("log")
            style.plain_log(axes.xaxis)
        axes.grid()
    style.legend_of(figure, panels[0], ncols=min(4, len(methods)))
    style.title(figure, "Above the line speculation is faster than plain decoding under the same load", subtitle)
    return style.save(figure, path)
