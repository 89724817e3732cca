"""Pictures of a run, readable without the code: titles, units, what a bar means, what the verifier promises."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from experiments.reporting.verdicts import title_picture
from experiments.results.summary import MethodSummary, Summary

STAGE_COLORS = {
    "prefill": "#999999",
    "draft": "#e69f00",
    "verify": "#0072b2",
    "accept": "#009e73",
    "commit": "#cc79a7",
    "other": "#dddddd",
}
_HALF_LINE = 55
"""Characters of a legend's entry of which two fit side by side."""
METHOD_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


def acceptance_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Acceptance by draft position, a panel per temperature; None if nothing was drafted."""
    drafting = [method for method in summary.methods if method.acceptance_by_position.rounds]
    if not drafting:
        return None
    temperatures = sorted({method.temperature for method in drafting})
    figure = Figure(figsize=(max(6.4, 4.8 * len(temperatures)), 4.4), layout="constrained")
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for panel, temperature in zip(panels, temperatures, strict=True):
        _acceptance_panel(panel, [method for method in drafting if method.temperature == temperature])
        panel.set_title(f"temperature {temperature:g}", fontsize=10)
    panels[0].set_ylabel("rounds in which the token was accepted")
    # One legend under all panels, so that it hides no bar; the diamond last, because it belongs to all methods.
    handles, labels = panels[0].get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda index: isinstance(handles[index], Line2D))
    figure.legend(
        [handles[index] for index in order],
        [labels[index] for index in order],
        loc="outside lower center",
        ncols=2 if max(len(label) for label in labels) <= _HALF_LINE else 1,
        fontsize=8,
        frameon=False,
    )
    plot_title(figure, "Acceptance by position in the draft", subtitle, summary)
    figure.savefig(path, dpi=150)
    return path


def _acceptance_panel(axes: Axes, methods: Sequence[MethodSummary]) -> None:
    width = 0.8 / len(methods)
    for index, method in enumerate(methods):
        by = method.acceptance_by_position
        positions = [i + 1 - 0.4 + width * (index + 0.5) for i in range(len(by.rounds))]
        color = METHOD_COLORS[index % len(METHOD_COLORS)]
        axes.bar(
            positions,
            by.unconditional,
            width * 0.92,
            color=color,
            label=f"{method.label}: of all rounds that drafted this far",
        )
        known = [(x, y) for x, y in zip(positions, by.conditional, strict=True) if y is not None]
        axes.plot(
            [x for x, _ in known],
            [y for _, y in known],
            linestyle="none",
            marker="D",
            markersize=5,
            markerfacecolor="white",
            markeredgecolor="black",
            label="of those that accepted all tokens before it" if index == 0 else None,
        )
    deepest = max(len(method.acceptance_by_position.rounds) for method in methods)
    axes.set_xticks(range(1, deepest + 1))
    axes.set_xlabel("position in the draft (1 = first drafted token)")
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def time_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Wall time per emitted token by stage, a bar per method; None if stages were not timed."""
    timed = [method for method in summary.methods if method.stage_seconds and method.tokens_per_second]
    if not timed:
        return None
    figure = Figure(figsize=(8, 1.9 + 0.5 * len(timed)), layout="constrained")
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
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(f"{total:.2f} ms", (total, row), **place)
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.15)
    axes.set_xlabel("wall time per emitted token (ms)")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    plot_title(figure, "Where the time goes", subtitle, summary)
    figure.savefig(path, dpi=150)
    return path


def speedup_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Speedup over plain decoding with its interval, a bar per method and temperature; None if that is one bar."""
    compared = [method for method in summary.methods if method.speedup is not None]
    if len(compared) < 2:
        return None
    names = list(dict.fromkeys(method.label for method in compared))
    temperatures = sorted({method.temperature for method in compared})
    figure = Figure(figsize=(max(6.4, 1.2 + 1.1 * len(names) * len(temperatures)), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(temperatures)
    top = 1.0
    for index, temperature in enumerate(temperatures):
        methods = [method for method in compared if method.temperature == temperature]
        positions = [names.index(method.label) - 0.4 + width * (index + 0.5) for method in methods]
        heights = [method.speedup or 0.0 for method in methods]
        color = METHOD_COLORS[index % len(METHOD_COLORS)]
        axes.bar(positions, heights, width * 0.92, color=color, label=f"temperature {temperature:g}")
        for x, height, method in zip(positions, heights, methods, strict=True):
            low, high = method.speedup_interval or (height, height)
            axes.vlines(x, low, high, color="black", linewidth=1.5)
            text = f"{height:.2f}x\nlength {method.mean_acceptance_length:.2f}"
            # Readable where the line of plain decoding crosses it.
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.annotate(
                text, (x, high), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=8, bbox=behind
            )
            top = max(top, high)
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--", label="plain decoding")
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, top * 1.25)
    axes.set_ylabel("tokens/s over plain decoding's")
    axes.set_xlabel("length: mean acceptance length, tokens per target forward (plain decoding: 1)", fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    plot_title(figure, f"Speedup over plain decoding, with {summary.confidence:.0%} intervals", subtitle, summary)
    figure.savefig(path, dpi=150)
    return path


def _milliseconds(method: MethodSummary, stage: str) -> float:
    tokens = (method.tokens_per_second or 0.0) * method.seconds
    return 1000 * method.stage_seconds.get(stage, 0.0) / tokens if tokens else 0.0


def plot_title(figure: Figure, title: str, subtitle: str, summary: Summary) -> None:
    """Title a picture: what it shows, the run's conditions, the kind of rule, and what is wrong with the run."""
    rules = sorted({method.exactness for method in summary.methods if method.exactness is not None})
    notes = [subtitle, f"acceptance rule: {', '.join(rules)}" if rules else ""]
    if not summary.complete:
        notes.append("INCOMPLETE RUN")
    # 10 points are about 0.08 inch per character.
    width = round(figure.get_figwidth() / 0.08)
    lines = [title, *textwrap.wrap("; ".join(note for note in notes if note), width)]
    title_picture(figure, lines, summary.not_lossless)


RUN_PLOTS = {"speedup.png": speedup_plot, "acceptance_by_position.png": acceptance_plot, "time.png": time_plot}
"""The pictures of every run, by file name."""
