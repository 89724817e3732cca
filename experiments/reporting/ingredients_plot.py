"""The ladder of ingredients as a picture: a bar per rung, and each ingredient by itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.reporting import style
from experiments.results.ingredients import Ladder, Ratio, Rung
from experiments.results.records import PLAIN

_SAME, _OTHER = style.COLORS[0], style.COLORS[1]
_ALONE, _LAST = (style.COLORS[2], "o"), (style.COLORS[4], "s")


@style.styled()
def ingredients_plot(ladder: Ladder, path: Path, subtitle: str, labels: Mapping[str, str]) -> Path:
    """Draw tokens per second of every rung with what it adds, and every ingredient alone and as the last one."""
    rows = max(len(ladder.rungs), len(ladder.effects))
    figure = style.new_figure(style.PAGE, 1.9 + 0.38 * rows)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    _rungs(left, ladder, labels)
    _effects(right, ladder)
    handles: list[object] = [
        Patch(facecolor=_SAME),
        Patch(facecolor=_OTHER, hatch="///", edgecolor="white"),
        Line2D([], [], color=_ALONE[0], marker=_ALONE[1], linestyle="none"),
        Line2D([], [], color=_LAST[0], marker=_LAST[1], linestyle="none"),
    ]
    words = [
        "bars: the output follows the target's law",
        "other weights: another law",
        "dots: added to plain decoding alone",
        "added to all the others",
    ]
    style.legend(figure, handles, words, ncols=2)
    headline = "" if ladder.headline is None else f": {ladder.headline.value:.1f}x in all"
    style.title(figure, f"Where the speedup comes from, one ingredient at a time{headline}", subtitle)
    return style.save(figure, path)


def _rungs(axes: Axes, ladder: Ladder, labels: Mapping[str, str]) -> None:
    largest = max(end for rung in ladder.rungs for end in (rung.tokens_per_second or 0.0, *(rung.interval or ())))
    for row, rung in enumerate(ladder.rungs):
        speed = rung.tokens_per_second or 0.0
        looks: dict[str, Any] = {"color": _SAME} if rung.same_law else {"color": _OTHER, "hatch": "///"}
        axes.barh(row, speed, height=0.62, edgecolor="white", **looks)
        if rung.interval is not None:
            axes.hlines(row, *rung.interval, color="black", linewidth=0.9)
        end = max(speed, rung.interval[1] if rung.interval is not None else 0.0)
        step = "" if rung.over_before is None else f"  (x {rung.over_before.value:.2f})"
        axes.annotate(
            f"{speed:.0f}{step}", (end, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7.5
        )
    axes.set_yticks(range(len(ladder.rungs)), [style.wrapped(_name(rung, labels), 25) for rung in ladder.rungs])
    axes.set_ylim(len(ladder.rungs) - 0.5, -0.5)
    axes.set_xlim(0, 1.5 * largest)
    axes.set_xlabel("output tokens/s of all users")
    axes.set_title("each rung adds one ingredient (x: over the one above)")
    axes.grid(axis="x")


def _effects(axes: Axes, ladder: Ladder) -> None:
    for row, effect in enumerate(ladder.effects):
        _dot(axes, effect.alone, row - 0.16, *_ALONE)
        _dot(axes, effect.last, row + 0.22, *_LAST)
    names = [style.wrapped(f"{effect.lever}: {effect.value}", 24) for effect in ladder.effects]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.axvline(1.0, color="black", linewidth=0.9, linestyle="--", zorder=1)
    known = [each for effect in ladder.effects for each in (effect.alone, effect.last) if each is not None]
    ends = [end for each in known for end in (each.value, *(each.interval or ()))]
    axes.set_xlim(0, 1.18 * max(ends, default=1.0))
    axes.set_xlabel("tokens/s with it, over without it")
    axes.set_title("each by itself (1: no effect)")
    axes.grid(axis="x")


def _dot(axes: Axes, found: Ratio | None, row: float, color: str, marker: str) -> None:
    if found is None:
        return
    if found.interval is not None:
        axes.hlines(row, *found.interval, color=color, linewidth=1.0)
    axes.plot([found.value], [row], color=color, marker=marker, linestyle="none")
    end = max(found.value, found.interval[1] if found.interval is not None else 0.0)
    place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
    place["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}  # the line at 1 is behind it
    axes.annotate(f"{found.value:.2f}", (end, row), **place)


def _name(rung: Rung, labels: Mapping[str, str]) -> str:
    return labels.get(rung.method, "plain decoding" if rung.method == PLAIN else rung.method)
