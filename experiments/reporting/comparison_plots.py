"""Pictures across runs."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from experiments.reporting.run_plots import METHOD_COLORS
from experiments.reporting.verdicts import title_picture
from experiments.results.comparison import Row

_MARKERS = "osD^vP*X<>"


def comparison_plot(rows: Sequence[Row], path: Path, subtitle: str) -> Path | None:
    """Mean acceptance length and speedup with their intervals, a line per method and settings; None without any."""
    rows = [row for row in rows if row.method.mean_acceptance_length is not None]
    if not rows:
        return None
    names = list(dict.fromkeys(row.name for row in rows))
    temperatures = sorted({row.method.temperature for row in rows})
    figure = Figure(figsize=(10, 2.2 + 0.42 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for index, temperature in enumerate(temperatures):
        chosen = [row for row in rows if row.method.temperature == temperature]
        offset = 0.0 if len(temperatures) == 1 else -0.2 + 0.4 * index / (len(temperatures) - 1)
        places = [names.index(row.name) + offset for row in chosen]
        style = {"color": METHOD_COLORS[index % len(METHOD_COLORS)], "label": f"temperature {temperature:g}"}
        length = [(row.method.mean_acceptance_length, row.method.mean_acceptance_length_interval) for row in chosen]
        speed = [(row.method.speedup, row.method.speedup_interval) for row in chosen]
        for axes, values in ((left, length), (right, speed)):
            _points(axes, places, values, **style)
    for axes, text in (
        (left, "mean acceptance length (tokens per target forward)"),
        (right, "speedup (tokens/s over plain decoding's)"),
    ):
        axes.axvline(1.0, color="black", linewidth=1, linestyle="--", zorder=1, label="plain decoding")
        axes.set_xlabel(text)
        axes.margins(x=0.12)
        axes.grid(axis="x", alpha=0.3)
        for row in range(len(names) - 1):
            axes.axhline(row + 0.5, color="#dddddd", linewidth=0.6)
    left.set_yticks(range(len(names)), [", ".join(name) for name in names], fontsize=8)
    left.set_ylim(len(names) - 0.5, -0.5)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    confidence = rows[0].run.summary.confidence
    _title(figure, f"Acceptance and speed over plain decoding, with {confidence:.0%} intervals", subtitle, rows)
    figure.savefig(path, dpi=150)
    return path


def acceptance_lines(rows: Sequence[Row], path: Path, subtitle: str) -> Path | None:
    """Acceptance by draft position, a panel per temperature and a line per method and settings; None without drafts."""
    rows = [row for row in rows if row.method.acceptance_by_position.rounds]
    if not rows:
        return None
    names = list(dict.fromkeys(row.name for row in rows))
    temperatures = sorted({row.method.temperature for row in rows})
    legend_rows = -(-len(names) // 2)
    size = (max(7.0, 4.6 * len(temperatures)), 4.0 + 0.2 * legend_rows)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    handles = {}
    for panel, temperature in zip(panels, temperatures, strict=True):
        for row in rows:
            if row.method.temperature != temperature:
                continue
            index = names.index(row.name)
            values = row.method.acceptance_by_position.unconditional
            (handles[row.name],) = panel.plot(
                range(1, len(values) + 1),
                values,
                color=METHOD_COLORS[index % len(METHOD_COLORS)],
                marker=_MARKERS[index % len(_MARKERS)],
                linestyle=("-", "--", ":")[index // len(METHOD_COLORS) % 3],
                markersize=5,
            )
        panel.set_title(f"temperature {temperature:g}", fontsize=10)
        panel.set_xlabel("position in the draft (1 = first drafted token)")
        panel.set_ylim(0, 1.04)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("rounds that accepted so far,\nof those that drafted so far")
    listed = [name for name in names if name in handles]
    figure.legend(
        [handles[name] for name in listed],
        [", ".join(name) for name in listed],
        loc="outside lower center",
        ncols=2,
        fontsize=8,
        frameon=False,
    )
    _title(figure, "Acceptance by position in the draft", subtitle, rows)
    figure.savefig(path, dpi=150)
    return path


def _points(
    axes: Axes,
    places: Sequence[float],
    values: Sequence[tuple[float | None, tuple[float, float] | None]],
    *,
    color: str,
    label: str,
) -> None:
    known = [(y, value, bounds or (value, value)) for y, (value, bounds) in zip(places, values, strict=True) if value]
    axes.plot([value for _, value, _ in known], [y for y, _, _ in known], "o", color=color, markersize=5, label=label)
    for y, value, (low, high) in known:
        axes.hlines(y, low, high, color=color, linewidth=1.5)
        place = {"xytext": (0, 4.5), "textcoords": "offset points", "ha": "center"}
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 0, "alpha": 0.8}  # over the line at 1
        axes.annotate(f"{value:.2f}", (value, y), fontsize=6.5, color=color, bbox=paper, zorder=1.5, **place)


def _title(figure: Figure, title: str, subtitle: str, rows: Sequence[Row]) -> None:
    # 10 points are about 0.08 inch per character.
    lines = [title, *textwrap.wrap(subtitle, round(figure.get_figwidth() / 0.08))]
    title_picture(figure, lines, [", ".join(row.name) for row in rows if row.method.not_lossless])
