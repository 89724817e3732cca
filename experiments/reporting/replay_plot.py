"""The picture of a replay: acceptance by rule, temperature and position."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from experiments.results.lossless import promises_exact
from experiments.tracing.figures import DraftSetFigures

_MARKERS = "osD^vP*X<>"


def reach_plot(done: Sequence[DraftSetFigures], path: Path, subtitle: str) -> Path:
    """Probability of accepting so far, by position: a row per temperature, a column per kind of drafts."""
    temperatures = sorted({each.drafts.temperature for each in done})
    kinds = list(dict.fromkeys(each.label for each in done))
    rules = list(dict.fromkeys((row.rule, row.exactness) for each in done for row in each.rows))
    size = (max(7.0, 3.0 * len(kinds) + 0.6), 2.9 * len(temperatures) + 1.2 + 0.18 * -(-len(rules) // 3))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(temperatures), len(kinds), sharex=True, sharey=True, squeeze=False)
    for panel in panels.flat:
        panel.set_visible(False)
    for each in done:
        panel = panels[temperatures.index(each.drafts.temperature)][kinds.index(each.label)]
        panel.set_visible(True)
        _panel(panel, each, rules)
    handles = {}
    for panel in panels.flat:
        handles |= dict(zip(*panel.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    for row, temperature in zip(panels, temperatures, strict=True):
        row[0].set_ylabel(f"T = {temperature:g}: rounds that\naccepted so far", fontsize=9)
    # 10 points are about 0.08 inch per character.
    about = f"one-round expectations on identical contexts; {subtitle}"
    lines = ["Acceptance by position, rule and drafts", *textwrap.wrap(about, round(size[0] / 0.08))]
    figure.suptitle("\n".join(lines), fontsize=10)
    figure.savefig(path, dpi=150)
    return path


def _panel(panel: Axes, each: DraftSetFigures, rules: list[tuple[str, str]]) -> None:
    for row in each.rows:
        # Lossy rules are not to be mixed with the others: grey and dotted.
        exact = promises_exact(row.exactness)
        index = [rule for rule in rules if promises_exact(rule[1]) is exact].index((row.rule, row.exactness))
        panel.plot(
            range(1, len(row.reach) + 1),
            row.reach,
            color=colormaps["tab10"](index % 10) if exact else "0.6",
            marker=_MARKERS[index % len(_MARKERS)],
            linestyle="-" if exact else ":",
            markersize=4,
            linewidth=1.2,
            zorder=3 if exact else 2,
            label=f"{row.rule} ({row.exactness})",
        )
    if each.bound is not None:
        style = {"color": "black", "linewidth": 1.5, "label": "bound of any lossless rule, first position"}
        panel.hlines(each.bound, 0.75, 1.25, **style)
    panel.set_title("\n".join(textwrap.wrap(each.label, 38)), fontsize=8)
    panel.set_xlabel("position in the draft", fontsize=8)
    panel.set_ylim(0, 1.04)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    panel.grid(alpha=0.3)
