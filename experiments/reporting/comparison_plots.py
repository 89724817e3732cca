"""Pictures across runs."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from experiments.reporting import style
from experiments.reporting.verdicts import warning
from experiments.results.comparison import Row

_LINES = ("-", "--", ":")


@style.styled()
def comparison_plot(rows: Sequence[Row], path: Path, subtitle: str) -> Path | None:
    """Mean acceptance length and speedup with their intervals, a line per method and settings; None without any."""
    rows = [row for row in rows if row.method.mean_acceptance_length is not None]
    if not rows:
        return None
    names = list(dict.fromkeys(row.name for row in rows))
    temperatures = sorted({row.method.temperature for row in rows})
    figure = style.new_figure(style.PAGE, 1.1 + (0.12 + 0.13 * len(temperatures)) * len(names))
    left, right = figure.subplots(1, 2, sharey=True)
    for index, temperature in enumerate(temperatures):
        chosen = [row for row in rows if row.method.temperature == temperature]
        offset = 0.0 if len(temperatures) == 1 else -0.26 + 0.52 * index / (len(temperatures) - 1)
        places = [names.index(row.name) + offset for row in chosen]
        looks = {"color": style.color(index), "marker": style.marker(index), "label": f"temperature {temperature:g}"}
        length = [(row.method.mean_acceptance_length, row.method.mean_acceptance_length_interval) for row in chosen]
        speed = [(row.method.speedup, row.method.speedup_interval) for row in chosen]
        for axes, values in ((left, length), (right, speed)):
            _points(axes, places, values, **looks)
    for axes, text in (
        (left, "mean acceptance length (tokens per target forward)"),
        (right, "speedup (tokens/s over plain decoding's)"),
    ):
        style.baseline(axes, vertical=True)
        axes.set_xlabel(text)
        axes.margins(x=0.14)
        axes.grid(axis="x")
        for row in range(len(names) - 1):
            axes.axhline(row + 0.5, color="#dddddd", linewidth=0.6)
    left.set_yticks(range(len(names)), [style.wrapped(", ".join(name), 34) for name in names])
    left.set_ylim(len(names) - 0.5, -0.5)
    style.legend(figure, *left.get_legend_handles_labels())
    confidence = rows[0].run.summary.confidence
    style.title(
        figure,
        f"Acceptance and speed over plain decoding, with {confidence:.0%} intervals",
        subtitle,
        alarm=_alarm(rows),
    )
    return style.save(figure, path)


@style.styled()
def acceptance_lines(rows: Sequence[Row], path: Path, subtitle: str) -> Path | None:
    """Acceptance by draft position, a panel per temperature and a line per method and settings; None without drafts."""
    rows = [row for row in rows if row.method.acceptance_by_position.rounds]
    if not rows:
        return None
    names = list(dict.fromkeys(row.name for row in rows))
    temperatures = sorted({row.method.temperature for row in rows})
    across = min(2, len(temperatures))
    down = -(-len(temperatures) // across)
    figure = style.new_figure(
        style.PAGE if across > 1 else style.COLUMN, 0.8 + 2.2 * down + 0.13 * -(-len(names) // across)
    )
    panels = figure.subplots(down, across, sharey=True, sharex=True, squeeze=False)
    for panel in panels.flat[len(temperatures) :]:
        panel.set_visible(False)
    handles = {}
    for panel, temperature in zip(panels.flat, temperatures, strict=False):
        for row in rows:
            if row.method.temperature != temperature:
                continue
            index = names.index(row.name)
            values = row.method.acceptance_by_position.unconditional
            (handles[row.name],) = panel.plot(
                range(1, len(values) + 1),
                values,
                color=style.color(index),
                marker=style.marker(index),
                linestyle=_LINES[index // len(style.COLORS) % len(_LINES)],
            )
        panel.set_title(f"temperature {temperature:g}")
        panel.set_xlabel("position in the draft")
        panel.set_ylim(0, 1.04)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.grid()
    for panel in panels[:, 0]:
        panel.set_ylabel("rounds that accepted so far,\nof those that drafted so far")
    listed = [name for name in names if name in handles]
    style.legend(figure, [handles[name] for name in listed], [", ".join(name) for name in listed])
    style.title(figure, "Acceptance by position in the draft (1 = first drafted token)", subtitle, alarm=_alarm(rows))
    return style.save(figure, path)


def _points(
    axes: Axes,
    places: Sequence[float],
    values: Sequence[tuple[float | None, tuple[float, float] | None]],
    *,
    color: str,
    marker: str,
    label: str,
) -> None:
    known = [(y, value, bounds or (value, value)) for y, (value, bounds) in zip(places, values, strict=True) if value]
    axes.plot([value for _, value, _ in known], [y for y, _, _ in known], marker, color=color, label=label)
    for y, value, (low, high) in known:
        axes.hlines(y, low, high, color=color, linewidth=1.3)
        place = {"xytext": (4, 0), "textcoords": "offset points", "ha": "left", "va": "center"}
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.85}  # over the line at 1
        axes.annotate(f"{value:.2f}", (high, y), fontsize=style.SMALLEST, color=color, bbox=paper, **place)


def _alarm(rows: Sequence[Row]) -> str:
    return warning([", ".join(row.name) for row in rows if row.method.not_lossless])
