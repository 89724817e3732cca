"""Pictures of a run, readable without the code: titles, units, what a bar means, what the verifier promises."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from experiments.reporting import style
from experiments.reporting.verdicts import warning
from experiments.results.summary import MethodSummary, Summary

STAGE_COLORS = {
    "ingestion": "#d55e00",
    "prefill": "#999999",
    "draft": "#e69f00",
    "verify": "#0072b2",
    "accept": "#009e73",
    "commit": "#cc79a7",
    "completion": "#56b4e9",
    "other": "#dddddd",
}


@style.styled()
def acceptance_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Acceptance by draft position, a panel per temperature; None if nothing was drafted.

    Bars are shares of all rounds that drafted this far, diamonds of those that accepted everything before. Both have
    the method's colour, and a diamond stands above the middle of its own bar, on a stem of that colour.
    """
    drafting = [method for method in summary.methods if method.acceptance_by_position.rounds]
    if not drafting:
        return None
    temperatures = sorted({method.temperature for method in drafting})
    names = list(dict.fromkeys(method.label for method in drafting))
    deepest = max(len(method.acceptance_by_position.rounds) for method in drafting)
    across = min(len(temperatures), 2) if deepest * len(names) <= 40 else 1
    down = -(-len(temperatures) // across)
    figure = style.new_figure(style.PAGE if across > 1 or deepest * len(names) > 10 else style.COLUMN, 0.9 + 2.1 * down)
    panels = figure.subplots(down, across, sharey=True, sharex=True, squeeze=False)
    for panel in panels.flat[len(temperatures) :]:
        panel.set_visible(False)
    for panel, temperature in zip(panels.flat, temperatures, strict=False):
        _acceptance_panel(panel, [method for method in drafting if method.temperature == temperature], names)
        panel.set_title(f"temperature {temperature:g}")
        panel.set_xticks(range(1, deepest + 1))
    for panel in panels[:, 0]:
        panel.set_ylabel("rounds that accepted it")
    for panel in panels[-1]:
        panel.set_xlabel("position in the draft (1 = first drafted token)")
    style.legend(
        figure,
        [
            *(Line2D([], [], color=style.color(index), linewidth=6) for index in range(len(names))),
            Line2D([], [], **_diamond("black"), linestyle="none"),
        ],
        [*names, "of rounds that accepted all tokens before it"],
        ncols=None if figure.get_figwidth() == style.COLUMN else min(4, len(names) + 1),
    )
    plot_title(figure, "Acceptance by position, of all rounds that drafted this far", subtitle, summary)
    return style.save(figure, path)


def _diamond(color: str) -> dict[str, Any]:
    return {
        "marker": "D",
        "markersize": 4,
        "markerfacecolor": "white",
        "markeredgecolor": color,
        "markeredgewidth": 1.1,
        "color": color,
    }


def _acceptance_panel(axes: Axes, methods: Sequence[MethodSummary], names: Sequence[str]) -> None:
    width = 0.84 / len(names)
    for method in methods:
        index = names.index(method.label)
        by = method.acceptance_by_position
        positions = [i + 1 - 0.42 + width * (index + 0.5) for i in range(len(by.rounds))]
        color = style.color(index)
        axes.bar(positions, by.unconditional, width * 0.9, color=color)
        for x, low, high in zip(positions, by.unconditional, by.conditional, strict=True):
            if high is None:
                continue
            axes.vlines(x, low, high, color=color, linewidth=0.8)
            axes.plot([x], [high], **_diamond(color))
    axes.set_ylim(0, 1.06)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y")


@style.styled()
def time_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Wall time per emitted token by stage, a bar per method; None if stages were not timed."""
    timed = [method for method in summary.methods if method.stage_seconds and method.tokens_per_second]
    if not timed:
        return None
    figure = style.new_figure(style.PAGE, 1.35 + 0.24 * len(timed))
    axes = figure.subplots()
    several = len({method.temperature for method in timed}) > 1
    names = [method.label + (f", T={method.temperature:g}" if several else "") for method in timed]
    left = [0.0] * len(timed)
    for stage, color in STAGE_COLORS.items():
        values = [_milliseconds(method, stage) for method in timed]
        if any(values):
            axes.barh(names, values, left=left, color=color, label=stage, edgecolor="white", linewidth=0.5)
            left = [start + value for start, value in zip(left, values, strict=True)]
    for row, total in enumerate(left):
        place = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": style.SMALLEST}
        axes.annotate(f"{total:.2f} ms", (total, row), **place)
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.15)
    axes.set_xlabel("wall time per emitted token (ms)")
    axes.grid(axis="x")
    style.legend(figure, *axes.get_legend_handles_labels(), ncols=4)
    plot_title(figure, "Where the time goes", subtitle, summary)
    return style.save(figure, path)


@style.styled()
def speedup_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Speedup over plain decoding with its interval, a bar per method and temperature; None if that is one bar."""
    compared = [method for method in summary.methods if method.speedup is not None]
    if len(compared) < 2:
        return None
    names = list(dict.fromkeys(method.label for method in compared))
    temperatures = sorted({method.temperature for method in compared})
    wide = len(names) * len(temperatures) > 4 or max(map(len, names)) > 10
    figure = style.new_figure(style.PAGE if wide else style.COLUMN, 2.9)
    axes = figure.subplots()
    width = 0.84 / len(temperatures)
    top = 1.0
    for index, temperature in enumerate(temperatures):
        methods = [method for method in compared if method.temperature == temperature]
        positions = [names.index(method.label) - 0.42 + width * (index + 0.5) for method in methods]
        heights = [method.speedup or 0.0 for method in methods]
        axes.bar(positions, heights, width * 0.92, color=style.color(index), label=f"temperature {temperature:g}")
        for x, height, method in zip(positions, heights, methods, strict=True):
            low, high = method.speedup_interval or (height, height)
            axes.vlines(x, low, high, color="black", linewidth=1.2)
            length = method.mean_acceptance_length
            text = f"{height:.2f}x" + ("" if length is None else f"\nlength {length:.2f}")
            # Readable where the line of plain decoding crosses it.
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
            place = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "fontsize": style.SMALLEST}
            axes.annotate(text, (x, high), bbox=behind, **place)
            top = max(top, high)
    line = style.baseline(axes)
    axes.set_xticks(range(len(names)), [style.wrapped(name, 16) for name in names])
    axes.set_ylim(0, top * 1.28)
    axes.set_ylabel("tokens/s over plain decoding's")
    axes.grid(axis="y")
    handles = [*axes.containers, line]
    style.legend(figure, handles, [*(f"temperature {t:g}" for t in temperatures), "plain decoding (length 1)"])
    confidence = f"{summary.confidence:.0%} intervals; length: mean acceptance length, tokens per target forward"
    plot_title(figure, f"Speedup over plain decoding, with {confidence}", subtitle, summary)
    return style.save(figure, path)


def _milliseconds(method: MethodSummary, stage: str) -> float:
    tokens = (method.tokens_per_second or 0.0) * method.seconds
    return 1000 * method.stage_seconds.get(stage, 0.0) / tokens if tokens else 0.0


def plot_title(figure: Figure, title: str, subtitle: str, summary: Summary) -> None:
    """Title a picture: what it shows, the run's conditions, the kind of rule, and whether the run is complete."""
    style.title(figure, title, conditions(subtitle, summary), alarm=warning(summary.not_lossless))


def conditions(subtitle: str, summary: Summary) -> str:
    """Returns the second line of a title: the run's conditions, the kind of rule, and whether the run is complete."""
    rules = sorted({method.exactness for method in summary.methods if method.exactness is not None})
    notes = [subtitle, f"acceptance rule: {', '.join(rules)}" if rules else ""]
    if not summary.complete:
        notes.append("INCOMPLETE RUN")
    if summary.noise is not None and summary.noise.noisy:
        notes.append("NOISY TIMINGS")
    return "; ".join(note for note in notes if note)


RUN_PLOTS = {"speedup.png": speedup_plot, "acceptance_by_position.png": acceptance_plot, "time.png": time_plot}
"""The pictures of every run, by file name."""
