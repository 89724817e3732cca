"""The four kinds of requests as a picture: a panel per kind, placed by the lengths of input and output."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from experiments.reporting import style
from experiments.results.quadrants import Quadrant
from experiments.results.records import PLAIN

_PLACES = {"SS": (0, 0), "SL": (0, 1), "LS": (1, 0), "LL": (1, 1)}
_WORDS = {"S": "short", "L": "long"}
_LOOKS = {"better": (style.COLORS[2], "o"), "worse": (style.COLORS[4], "v"), "unsure": (style.FAINT, "D")}
"""Color and marker, by what the interval says."""


@style.styled()
def quadrants_plot(found: Sequence[Quadrant], path: Path, subtitle: str, labels: Mapping[str, str]) -> Path:
    """Draw how many times better every method is than plain decoding, by each quadrant's own metric."""
    names = list(dict.fromkeys(each.method for quadrant in found for each in quadrant.methods if each.method != PLAIN))
    figure = style.new_figure(style.PAGE, 3.0 + 0.44 * max(2, len(names)))
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    gains = [end for q in found for m in q.methods for end in (m.gain or 1.0, *(m.gain_interval or ()))] or [1.0]
    for quadrant in found:
        _panel(panels[_PLACES[quadrant.name]], quadrant, names)
    for name in set(_PLACES) - {quadrant.name for quadrant in found}:
        panels[_PLACES[name]].annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center")
    for row in panels:
        row[0].set_yticks(range(len(names)), [style.wrapped(labels.get(name, name), 24) for name in names])
    panels[0][0].set_ylim(len(names) - 0.4, -0.6)
    least, most = min(1.0, *gains), max(1.0, *gains)
    room = 0.18 * (most - least)
    panels[0][0].set_xlim(max(0.0, least - 0.4 * room), most + room)
    for axes in panels[1]:
        axes.set_xlabel("times better than plain decoding")
    handles = [Line2D([], [], color=color, marker=marker) for color, marker in _LOOKS.values()]
    style.legend(figure, handles, ["better than plain decoding", "worse", "cannot be told: the interval holds 1"])
    style.title(figure, "Four kinds of requests: what counts for each, and what drafting does to it", subtitle)
    return style.save(figure, path)


def _panel(axes: Axes, quadrant: Quadrant, names: Sequence[str]) -> None:
    for each in quadrant.methods:
        if each.gain is None:
            continue
        row = names.index(each.method)
        low, high = each.gain_interval or (each.gain, each.gain)
        color, marker = _LOOKS["better" if low > 1 else "worse" if high < 1 else "unsure"]
        axes.hlines(row, low, high, color=color, linewidth=1.4)
        axes.plot([each.gain], [row], color=color, marker=marker, linestyle="none")
        place: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
        place["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}  # the line at 1 is behind it
        axes.annotate(f"{each.gain:.2f}", (high, row), **place)
    plain = quadrant.plain
    value = "" if plain is None or plain.own is None else f"plain decoding: {_short(plain.own)} {quadrant.metric.unit}"
    first, second = (_WORDS[letter] for letter in quadrant.name)
    lengths = f"{first} input ({quadrant.input_tokens:.0f} tokens), {second} output ({quadrant.output_tokens:.0f})"
    axes.set_title(f"{lengths}\nwhat counts: {quadrant.metric.meaning}\n{value}", fontsize=7.5)
    axes.axvline(1.0, color="black", linewidth=0.9, linestyle="--", zorder=1)
    axes.grid(axis="x")


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
