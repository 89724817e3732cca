"""The four kinds of requests as a picture: a panel per kind, placed by the lengths of input and output."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from experiments.reporting import style
from experiments.results.quadrants import Quadrant
from experiments.results.records import PLAIN

_PLACES = {"SS": (0, 0), "SL": (0, 1), "LS": (1, 0), "LL": (1, 1)}
_WORDS = {"S": "short", "L": "long"}
_BETTER, _WORSE, _UNSURE = style.COLORS[2], style.COLORS[4], style.FAINT


@style.styled()
def quadrants_plot(found: Sequence[Quadrant], path: Path, subtitle: str, labels: Mapping[str, str]) -> Path:
    """Draw how many times better every method is than plain decoding, by each quadrant's own metric."""
    names = list(dict.fromkeys(each.method for quadrant in found for each in quadrant.methods if each.method != PLAIN))
    figure = style.new_figure(style.PAGE, 2.3 + 0.46 * max(2, len(names)))
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    most = max(
        (end for q in found for m in q.methods for end in (m.gain or 1.0, *(m.gain_interval or ()))), default=1.0
    )
    for quadrant in found:
        _panel(panels[_PLACES[quadrant.name]], quadrant, names, most)
    empty = set(_PLACES) - {quadrant.name for quadrant in found}
    for name in empty:
        panels[_PLACES[name]].annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center")
    for row in panels:
        row[0].set_yticks(range(len(names)), [style.wrapped(labels.get(name, name), 24) for name in names])
    panels[0][0].set_ylim(len(names) - 0.5, -0.5)
    panels[0][0].set_xlim(0, 1.12 * most)
    for axes in panels[1]:
        axes.set_xlabel("times better than plain decoding, by the panel's own metric")
    handles = [Line2D([], [], color=color, marker="o") for color in (_BETTER, _WORSE, _UNSURE)]
    style.legend(figure, handles, ["better than plain decoding", "worse", "the interval holds 1"])
    style.title(figure, "Four kinds of requests, what each is about, and what drafting does to it", subtitle)
    return style.save(figure, path)


def _panel(axes: Axes, quadrant: Quadrant, names: Sequence[str], most: float) -> None:
    for each in quadrant.methods:
        if each.gain is None:
            continue
        row = names.index(each.method)
        low, high = each.gain_interval or (each.gain, each.gain)
        color = _BETTER if low > 1 else _WORSE if high < 1 else _UNSURE
        axes.hlines(row, low, high, color=color, linewidth=1.4)
        axes.plot([each.gain], [row], color=color, marker="o", linestyle="none")
        axes.annotate(
            f"{each.gain:.2f}", (high, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7
        )
    plain = quadrant.plain
    value = "" if plain is None or plain.own is None else f"; plainly {_short(plain.own)} {quadrant.metric.unit}"
    first, second = (_WORDS[letter] for letter in quadrant.name)
    axes.set_title(
        f"{first} input ({quadrant.input_tokens:.0f}), {second} output ({quadrant.output_tokens:.0f} tokens):\n"
        f"{quadrant.metric.meaning}{value}",
        fontsize=7.5,
    )
    axes.axvline(1.0, color="black", linewidth=0.9, linestyle="--", zorder=1)
    axes.grid(axis="x")


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
