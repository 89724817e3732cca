"""Mean acceptance length and speedup as dots with intervals, side by side, a line per method."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from experiments.reporting import style
from experiments.results.summary import MethodSummary

LENGTH = "mean acceptance length (tokens per target forward)"
SPEEDUP = "speedup (tokens/s over plain decoding's)"


def length_and_speedup(
    entries: Sequence[tuple[str, MethodSummary]], path: Path, title: str, subtitle: str, *, alarm: str = ""
) -> Path | None:
    """Draw and save the picture; returns None where nothing was accepted or counted.

    Args:
        entries: Names, and figures at one temperature; entries of the same name share a line.
        path: The PNG. An SVG is written beside it.
        title: What the picture shows.
        subtitle: The conditions.
        alarm: What a reader must not miss.
    """
    entries = [(name, method) for name, method in entries if method.mean_acceptance_length is not None]
    if not entries:
        return None
    names = list(dict.fromkeys(name for name, _ in entries))
    temperatures = sorted({method.temperature for _, method in entries})
    figure = style.new_figure(style.PAGE, 1.1 + (0.12 + 0.13 * len(temperatures)) * len(names))
    left, right = figure.subplots(1, 2, sharey=True)
    for index, temperature in enumerate(temperatures):
        chosen = [(name, method) for name, method in entries if method.temperature == temperature]
        offset = 0.0 if len(temperatures) == 1 else -0.26 + 0.52 * index / (len(temperatures) - 1)
        places = [names.index(name) + offset for name, _ in chosen]
        looks = {"color": style.color(index), "marker": style.marker(index), "label": f"temperature {temperature:g}"}
        length = [(method.mean_acceptance_length, method.mean_acceptance_length_interval) for _, method in chosen]
        speed = [(method.speedup, method.speedup_interval) for _, method in chosen]
        for axes, values in ((left, length), (right, speed)):
            _points(axes, places, values, **looks)
    for axes, text in ((left, LENGTH), (right, SPEEDUP)):
        style.baseline(axes, vertical=True)
        axes.set_xlabel(text)
        axes.margins(x=0.14)
        axes.grid(axis="x")
        for row in range(len(names) - 1):
            axes.axhline(row + 0.5, color="#dddddd", linewidth=0.6)
    left.set_yticks(range(len(names)), [style.wrapped(name, 34) for name in names])
    left.set_ylim(len(names) - 0.5, -0.5)
    style.legend(figure, *left.get_legend_handles_labels())
    style.title(figure, title, subtitle, alarm=alarm)
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
